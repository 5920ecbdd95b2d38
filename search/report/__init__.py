"""Reports of stored runs: one page with figures, tables and calibration."""
