"""Training in one process, peers in turn: the product's own work, rounds and updates, and the rules of others."""
