"""The decoding loop: its types and its four verbs over token ids, standard library only."""
