//! Structs that lie in the shared record as bytes.

/// Declares a struct whose fields lie in a byte array one after another, little-endian, without gaps.
///
/// Reading takes a whole struct by value: the optimizer drops the fields that the caller does not look at, so a scan over
/// many hosts costs only what it uses.
macro_rules! packed {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$field_meta:meta])* $seen:vis $field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name { $($(#[$field_meta])* $seen $field: $kind,)* }

        impl $name {
            /// The struct's length in the record, in bytes.
            pub const BYTES: usize = 0 $(+ size_of::<$kind>())*;

            /// Reads the struct from its bytes: any bytes are some value.
            #[inline]
            pub fn read(bytes: &[u8; Self::BYTES]) -> Self {
                let rest = bytes.as_slice();
                $(let (field, rest) = $crate::core::packed::split(rest); let $field = <$kind>::from_le_bytes(field);)*
                let _ = rest;
                Self { $($field,)* }
            }

            /// Writes the struct over its bytes.
            #[inline]
            pub fn write(&self, bytes: &mut [u8; Self::BYTES]) {
                let rest = bytes.as_mut_slice();
                $(let rest = $crate::core::packed::put(rest, self.$field.to_le_bytes());)*
                let _ = rest;
            }
        }
    };
}
pub(crate) use packed;

/// The first `N` bytes and the rest; zeros past the end, which the lengths above rule out.
#[inline]
pub(crate) fn split<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    bytes.split_first_chunk().map_or(([0; N], &[]), |(head, rest)| (*head, rest))
}

/// Writes `field` at the front and gives what lies behind it.
#[inline]
pub(crate) fn put<const N: usize>(bytes: &mut [u8], field: [u8; N]) -> &mut [u8] {
    match bytes.split_first_chunk_mut() {
        Some((head, rest)) => {
            *head = field;
            rest
        }
        None => &mut [],
    }
}
