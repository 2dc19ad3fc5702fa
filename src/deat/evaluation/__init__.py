"""The judge: attacks, and what they leave of an accuracy. Imports no training code."""
