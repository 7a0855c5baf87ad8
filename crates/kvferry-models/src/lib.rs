//! Hugging Face configurations and engine descriptions turned into cache geometry.
