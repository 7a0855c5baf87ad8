//! Lists with a bound on the number of elements, that reserve next to nothing for elements that have not arrived.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Elements for which a list has room from the beginning, if so many are announced. Where they don't come, reading ends.
const FEW: usize = 16;

/// A list of at most `N` elements.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct List<T, const N: usize>(pub(super) Vec<T>);

impl<T, const N: usize> FromIterator<T> for List<T, N> {
    fn from_iter<I: IntoIterator<Item = T>>(iter: I) -> Self {
        Self(iter.into_iter().collect())
    }
}

impl<T, const N: usize> IntoIterator for List<T, N> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<T: Serialize, const N: usize> Serialize for List<T, N> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if self.0.len() > N {
            return Err(S::Error::custom("a list is longer than its bound"));
        }
        s.collect_seq(&self.0)
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for List<T, N> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Elements<T, const N: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for Elements<T, N> {
            type Value = List<T, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {N} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                if seq.size_hint().is_some_and(|n| n > N) {
                    return Err(A::Error::invalid_length(N, &self));
                }
                // Beyond a few it is grown as elements arrive: an announced number reserves nothing.
                let mut out = Vec::with_capacity(seq.size_hint().unwrap_or(0).min(FEW));
                while let Some(element) = seq.next_element()? {
                    if out.len() == N {
                        return Err(A::Error::invalid_length(N, &self));
                    }
                    out.push(element);
                }
                Ok(List(out))
            }
        }
        d.deserialize_seq(Elements(PhantomData))
    }
}
