"""Models: Hugging Face models and tokenizers as what the engine and the face ask for."""
