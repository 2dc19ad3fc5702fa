"""One way to train and evaluate: what is asked for, where it is kept, and how it is carried out."""
