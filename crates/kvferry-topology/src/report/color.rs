//! A scale of colours for amounts: its lightness changes in even steps, so that equal differences look equal, also in grey.
//!
//! It goes along a line in [OKLCh](https://bottosson.github.io/posts/oklab/) from pale yellow over green and blue to dark violet; on a dark
//! page the other way round, so that much always stands out.

use std::fmt::Write as _;

/// How many colours the scale has; each is named by one letter.
pub(super) const LEVELS: usize = 52;

/// The letter of a level.
pub(super) fn letter(level: usize) -> char {
    let byte = u8::try_from(level.min(LEVELS - 1)).unwrap_or(0);
    char::from(if byte < 26 { b'a' + byte } else { b'A' + byte - 26 })
}

/// The level of a part of one.
pub(super) fn level(part: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it lies between 0 and the levels")]
    let level = (part.clamp(0.0, 1.0) * (LEVELS - 1) as f64).round() as usize;
    level.min(LEVELS - 1)
}

/// As much colour as all of the line can have: no more than this can be shown in its middle.
const CHROMA: f64 = 0.098;

/// A colour of the scale, from little (0) to much (1).
fn color(part: f64, dark: bool) -> [f64; 3] {
    let (lightness, turn) = if dark { (0.27 + 0.66 * part, 1.0 - part) } else { (0.93 - 0.66 * part, part) };
    srgb(lightness, CHROMA, (108.0 + 190.0 * turn).to_radians())
}

/// OKLCh to sRGB, with the matrices of the definition.
fn srgb(lightness: f64, chroma: f64, hue: f64) -> [f64; 3] {
    let (a, b) = (chroma * hue.cos(), chroma * hue.sin());
    let l = (lightness + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
    let m = (lightness - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
    let s = (lightness - 0.089_484_177_5 * a - 1.291_485_548 * b).powi(3);
    [
        4.076_741_662_1 * l - 3.307_711_591_3 * m + 0.230_969_929_2 * s,
        -1.268_438_004_6 * l + 2.609_757_401_1 * m - 0.341_319_396_5 * s,
        -0.004_196_086_3 * l - 0.703_418_614_7 * m + 1.707_614_701 * s,
    ]
    .map(|c| if c <= 0.003_130_8 { 12.92 * c } else { 1.055 * c.powf(1.0 / 2.4) - 0.055 })
}

fn hex(color: [f64; 3]) -> String {
    let mut out = String::from("#");
    for channel in color {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it lies between 0 and 255")]
        let byte = (channel.clamp(0.0, 1.0) * 255.0).round() as u8;
        let _ = write!(out, "{byte:02x}");
    }
    out
}

fn variables(dark: bool) -> String {
    let mut out = String::new();
    for n in 0..LEVELS {
        let part = n as f64 / (LEVELS - 1) as f64;
        let _ = write!(out, "--{}:{};", letter(n), hex(color(part, dark)));
    }
    out
}

/// Rules for a page: the colours as variables, on light and on dark ground, and which cell has which, by the letter that is its class.
pub(super) fn rules() -> String {
    let (light, dark) = (variables(false), variables(true));
    let mut out = format!(":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n");
    for c in (0..LEVELS).map(letter) {
        let _ = writeln!(out, ".heat .{c}{{fill:var(--{c})}}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lightness as OKLab has it, from sRGB, with the matrices that lead there.
    fn lightness(color: [f64; 3]) -> f64 {
        let [r, g, b] = color.map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) });
        let l = 0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b;
        let m = 0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b;
        let s = 0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b;
        0.210_454_255_3 * l.cbrt() + 0.793_617_785 * m.cbrt() - 0.004_072_046_8 * s.cbrt()
    }

    #[test]
    fn lightness_goes_in_even_steps_and_every_colour_can_be_shown() {
        for dark in [false, true] {
            let colors: Vec<_> = (0..LEVELS).map(|n| color(n as f64 / (LEVELS - 1) as f64, dark)).collect();
            for (n, c) in colors.iter().enumerate() {
                assert!(c.iter().all(|c| (-0.002..1.002).contains(c)), "{dark} {n}: {c:?}");
            }
            for pair in colors.windows(2) {
                let step = lightness(pair[1]) - lightness(pair[0]);
                let wanted = if dark { 0.66 } else { -0.66 } / (LEVELS - 1) as f64;
                assert!((step - wanted).abs() < 1e-4, "{dark}: {step} is not {wanted}");
            }
        }
    }

    #[test]
    fn each_level_has_a_letter_of_its_own() {
        let letters: std::collections::BTreeSet<char> = (0..LEVELS).map(letter).collect();
        assert_eq!(letters.len(), LEVELS);
        assert_eq!((level(0.0), level(1.0), level(f64::NAN), level(7.0)), (0, LEVELS - 1, 0, LEVELS - 1));
    }
}
