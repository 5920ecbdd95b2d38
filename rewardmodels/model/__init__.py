"""The critic model: tokens, the scalar decoder, scoring with shared prefixes, and the folder that it is saved to."""
