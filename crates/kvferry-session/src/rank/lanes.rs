//! The lanes to producers' ranks.

use kvferry_transport::Lane;

/// The most bytes of a lane's text in a report.
const MAX_TEXT: usize = 240;

/// A lane in words: its kind, what the library calls what carries the bytes, and what the backend says of it.
pub(super) fn text(lane: &Lane) -> String {
    let mut text = lane.kind.to_string();
    if !lane.transports.is_empty() {
        text = format!("{text} ({})", lane.transports.join(", "));
    }
    if !lane.detail.is_empty() {
        text = format!("{text}: {}", lane.detail);
    }
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    text.truncate(end);
    text
}
