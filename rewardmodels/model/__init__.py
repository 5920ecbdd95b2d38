"""The critic model: tokenization, the scalar decoder, scoring with shared prefixes, and its folder format."""
