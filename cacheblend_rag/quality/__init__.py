"""Quality: metrics now, calibration and guard later."""
