"""Train and rollout engines, weight sync. Engines know torch; they know neither Ray nor any algorithm."""
