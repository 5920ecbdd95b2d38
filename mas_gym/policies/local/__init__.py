"""Local models with transformers: chat templates, decoding and the forward pass."""

from mas_gym.errors import need

for _package in ("torch", "transformers"):
    need(_package, "running a model in this process", "local")
