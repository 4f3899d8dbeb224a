"""Surrogates by their gradient weights F(w, A), a file per paper. All work on log-ratios; none overflows for finite input."""
