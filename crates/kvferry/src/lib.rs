//! Moves KV caches between LLM engines of any two layouts.
