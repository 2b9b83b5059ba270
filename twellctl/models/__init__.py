"""Model folders: what lies in them, how they become torch models, what one hands to the next."""
