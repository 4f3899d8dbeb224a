"""The nouns that cross packages: prompts and their images, rollouts, rewards, batches of tokens."""
