//! The few fields of `xds.data.orca.v3.OrcaLoadReport` that matter here, out of protobuf's wire format. All others are skipped.
//!
//! A field that has its default, which is 0, is not in the message, and so nobody can tell it from one that was never set: it is not told.

use super::Report;

/// The report; `None`: the bytes are no message.
pub fn report(bytes: &[u8]) -> Option<Report> {
    const MAPS: [u64; 2] = [5, 8];
    let mut report = Report::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        match field(&mut rest)? {
            (1, Value::Double(value)) => report.cpu = Some(value),
            (2, Value::Double(value)) => report.memory = Some(value),
            (9, Value::Double(value)) => report.application = Some(value),
            (number, Value::Bytes(bytes)) if MAPS.contains(&number) => {
                let (name, value) = entry(bytes)?;
                report.take_named(name, value);
            }
            _ => {}
        }
    }
    Some(report)
}

enum Value<'a> {
    Double(f64),
    Bytes(&'a [u8]),
    Other,
}

fn entry(mut rest: &[u8]) -> Option<(&[u8], f64)> {
    let (mut name, mut number): (&[u8], f64) = (&[], 0.0);
    while !rest.is_empty() {
        match field(&mut rest)? {
            (1, Value::Bytes(bytes)) => name = bytes,
            (2, Value::Double(value)) => number = value,
            _ => {}
        }
    }
    Some((name, number))
}

fn field<'a>(rest: &mut &'a [u8]) -> Option<(u64, Value<'a>)> {
    let tag = varint(rest)?;
    let value = match tag & 7 {
        0 => {
            varint(rest)?;
            Value::Other
        }
        1 => Value::Double(f64::from_le_bytes(take(rest, 8)?.try_into().ok()?)),
        2 => {
            let length = usize::try_from(varint(rest)?).ok()?;
            Value::Bytes(take(rest, length)?)
        }
        5 => {
            take(rest, 4)?;
            Value::Other
        }
        // Groups are history; this message never had one.
        _ => return None,
    };
    Some((tag >> 3, value)).filter(|(number, _)| *number != 0)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(taken)
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    // Ten times seven bits hold 64 of them.
    for shift in (0..70).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7F).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
