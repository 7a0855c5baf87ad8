//! Measured numbers as whole ones.

/// The whole number that is nearest, from 0 to the largest there is; 0 for what is no number.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "casts of floats stop at the ends, and no number is 0"
)]
pub(crate) fn nearest(x: f64) -> u64 {
    x.round() as u64
}

/// The number without its fraction, at the ends as [`nearest`].
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cutting off is what it is for")]
pub(crate) fn cut(x: f64) -> u64 {
    x as u64
}

/// As a place in a list.
pub(crate) fn place(x: f64) -> usize {
    usize::try_from(nearest(x)).unwrap_or(usize::MAX)
}

/// With fewer digits, for series that are only drawn.
#[allow(clippy::cast_possible_truncation, reason = "digits are what is given up")]
pub(crate) fn short(x: f64) -> f32 {
    x as f32
}
