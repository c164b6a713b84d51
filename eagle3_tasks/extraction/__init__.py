"""Work on the target model: answers and hidden states, shard by shard."""
