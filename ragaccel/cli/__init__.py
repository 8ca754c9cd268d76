"""The command line: ask a folder of documents, one file a verb."""
