"""ragaccel in LlamaIndex."""
