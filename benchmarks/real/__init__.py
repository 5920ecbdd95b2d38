"""Pages about recorded runs of real language models; ``--data DIR`` names the folder with the recordings."""
