"""Tasks whose problems are generated: Arithmetic and Ordering."""
