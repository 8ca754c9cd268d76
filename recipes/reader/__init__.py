"""The bundled reader's recipe: from text archives to a small model that answers by quoting."""
