"""One minibatch, played as a game between an adversary and a learner."""
