"""Local models with transformers: chat templates, decoding and the forward pass."""
