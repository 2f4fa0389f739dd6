//! Base64 as headers carry it: either alphabet, with or without padding.

/// The bytes; `None`: it is no base64.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    // One sextet holds no byte.
    if text.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for group in text.chunks(4) {
        let mut bits = 0u32;
        for letter in group {
            bits = bits << 6 | sextet(*letter)?;
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend(bits.to_be_bytes().into_iter().skip(1).take(group.len() - 1));
    }
    Some(bytes)
}

fn sextet(letter: u8) -> Option<u32> {
    Some(u32::from(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' | b'-' => 62,
        b'/' | b'_' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_examples_of_rfc_4648_are_read() {
        let examples = [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob"), ("Zm9vYmE=", "fooba")];
        for (text, bytes) in examples {
            assert_eq!(decode(text.as_bytes()), Some(bytes.as_bytes().to_vec()), "{text}");
            assert_eq!(decode(text.trim_end_matches('=').as_bytes()), Some(bytes.as_bytes().to_vec()), "{text}");
        }
        assert_eq!(decode(b"-_+/"), Some(vec![0xFB, 0xFF, 0xBF]));
    }

    #[test]
    fn what_is_no_base64_is_refused() {
        for text in ["A", "AAAAA", "A===", "====", "Zm 9v", "Zm9v\n", "Zg=x", "Zm9v,Zm9v", "\u{fc}bel"] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(decoded) = decode(&bytes) {
                prop_assert!(decoded.len() <= bytes.len() * 3 / 4);
            }
        }
    }
}
