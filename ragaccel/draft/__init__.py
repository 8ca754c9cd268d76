"""Drafters: where the guesses come from; standard library and numpy."""
