"""Inference by short run Langevin dynamics, its free energy and its step size; needs torch alone."""
