"""Reports of stored runs: figures, tables and calibration on one page."""
