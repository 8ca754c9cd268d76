"""SAR-SFT, SPACE's recipe: from prompts with answers to a model that guesses at mask tokens."""
