"""The bundled reader's recipe: from people's questions to a small model that answers by quoting."""
