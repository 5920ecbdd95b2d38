"""The paper's tables, each with one command and one page: see ``benchmarks/README.md``.

Run from the checkout, as in ``python -m benchmarks.paper.heads --out tables``.
"""
