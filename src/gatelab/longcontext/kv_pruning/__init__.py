"""Key/value caches cut to a budget, by gates and by the methods of others, and what each costs."""
