"""What runs did, on one page: what `lockstep report` writes."""
