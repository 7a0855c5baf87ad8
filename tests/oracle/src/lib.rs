//! The slow oracle: walks logical coordinates one by one.
