"""Floor 4: who owns which byte, page and row: arena, pools, allocator, prefix cache, budget."""
