"""The loops of served exchanges: what they refuse, how they end, and what all workers see."""
