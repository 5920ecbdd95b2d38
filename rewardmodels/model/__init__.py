"""The critic model: tokenisation, the scalar decoder, scoring with shared prefixes, and its folder format."""
