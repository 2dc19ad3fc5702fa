"""Evaluation under attack: the attacks, the accuracies under them, and checks of the result. Imports no training code."""
