//! The page at `/`, as one file: it asks nobody but this listener for anything.

/// The page. Its script and its style are in it, and only those two run: see [`POLICY`].
pub const PAGE: &str = include_str!("page.html");

/// The page's Content-Security-Policy. The hashes are those of the one script and the one style in it; a test says what they should be.
pub const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-xzMEAphWfYP/V+u5O5XhRAcGjnZIqVXIb3FNqOpt2nA='; \
    style-src 'sha256-XuNOxCh+67kAmq6yee7TX3swshbrrqRhJ6JNKzbErH8='; \
    connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::telemetry::base64;

    /// What stands between the only two tags of this name.
    fn inside(tag: &str) -> &'static str {
        let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
        assert_eq!((PAGE.matches(&open).count(), PAGE.matches(&close).count()), (1, 1), "one {tag} in the page");
        let rest = PAGE.split_once(&format!("{open}>")).expect("a tag without attributes").1;
        rest.split_once(&close).expect("its end").0
    }

    #[test]
    fn the_policy_lets_the_pages_own_script_and_style_run_and_no_other() {
        for tag in ["script", "style"] {
            let (_, rest) = POLICY.split_once(&format!("{tag}-src 'sha256-")).expect("a hash");
            let hash = rest.split_once('\'').expect("its end").0;
            let expected = Sha256::digest(inside(tag));
            assert!(
                base64::decode(hash.as_bytes()).as_deref() == Some(&expected[..]),
                "the page's {tag} has changed: printf '%s' its text | openssl dgst -sha256 -binary | base64 says what its hash is now, not {hash}"
            );
        }
        assert!(POLICY.starts_with("default-src 'none';") && !POLICY.contains("unsafe"), "{POLICY}");
    }

    #[test]
    fn the_page_is_small_and_asks_nobody_else() {
        assert!(PAGE.len() < 46_000, "{} bytes", PAGE.len());
        let addresses: Vec<&str> =
            PAGE.match_indices("://").map(|(at, _)| &PAGE[at.saturating_sub(5)..(at + 17).min(PAGE.len())]).collect();
        // The name of a vocabulary, which nobody fetches.
        assert!(
            addresses.iter().all(|address| address.ends_with("://www.w3.org/20") || address.contains("www.w3.org")),
            "{addresses:?}"
        );
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick="] {
            assert!(!PAGE.contains(word), "{word}");
        }
    }
}
