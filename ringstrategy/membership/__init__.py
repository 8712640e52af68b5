"""Which processes train together: how they meet, and how the others go on when one is lost."""
