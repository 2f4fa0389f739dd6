use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::config::Role;
use crate::roles::fake::{Call, Fake, Process};

/// The root's context id.
const ROOT: u32 = 1;

/// One VM with one classifier.
struct Bench {
    host: Fake,
    desk: Desk<Fake>,
    plan: Rc<Plan>,
    streams: u32,
}

fn plan(root: u32, keys: &str) -> Rc<Plan> {
    let json =
        format!(r#"{{"classify": {{"class": ["/size"], "cost": ["/steps"], "model": "/model", "session": ["/user"]{keys}}}}}"#);
    match Role::parse(json.as_bytes()) {
        Ok(Role::Classifier(config)) => Rc::new(Plan::new(root, &config)),
        other => panic!("{json}: {other:?}"),
    }
}

impl Bench {
    fn new(keys: &str) -> Self {
        let process: Arc<Process> = Process::new(1);
        let host = Fake::new(&process);
        Self { desk: Desk::new(host.clone()), host, plan: plan(ROOT, keys), streams: 10 }
    }

    /// A request with these headers, and whether it is held.
    fn request(&mut self, headers: &[(&str, &str)], ends: bool) -> (u32, Course) {
        self.streams += 1;
        let id = self.streams;
        self.host.stream(id, |stream| {
            stream.root = ROOT;
            stream.headers = headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        });
        self.host.make_current(id);
        let course = self.desk.headers(&self.plan, id, ends);
        (id, course)
    }

    fn held(&mut self) -> u32 {
        let (id, course) = self.request(&[(":method", "POST")], false);
        assert_eq!(course, Course::Held);
        id
    }

    fn piece(&mut self, id: u32, piece: &[u8], ends: bool) -> Course {
        self.host.make_current(id);
        self.host.stream(id, |stream| stream.upload = piece.to_vec());
        self.desk.body(id, piece.len(), ends)
    }

    fn tick(&mut self, times: u32) {
        for _ in 0..times {
            self.host.make_current(ROOT);
            self.desk.tick(ROOT);
        }
    }

    fn state(&self, id: u32) -> BTreeMap<String, String> {
        self.host.stream(id, |stream| stream.filter_state.clone())
    }

    fn class(&self, id: u32) -> Option<String> {
        self.state(id).remove("plimsoll.class")
    }

    fn resumed(&self, id: u32) -> u32 {
        self.host.stream(id, |stream| stream.resumed)
    }

    fn nothing_is_held(&self) {
        assert_eq!((self.desk.held.len(), self.desk.bytes), (0, 0));
    }
}

#[test]
fn what_a_body_says_is_passed_on_with_its_last_piece() {
    let mut bench = Bench::new("");
    let id = bench.held();
    assert_eq!(bench.piece(id, br#"  {"size": "512x512", "steps": "2"#, false), Course::Held);
    assert_eq!(bench.piece(id, b"", false), Course::Held);
    assert_eq!(bench.state(id), BTreeMap::new());
    assert_eq!(bench.piece(id, br#"0", "model": "flux", "user": "ann"}"#, true), Course::GoesOn);
    let state = bench.state(id);
    let values = ["class", "cost", "model"].map(|name| state[&format!("plimsoll.{name}")].as_str());
    assert_eq!(values, ["512x512", "20", "flux"]);
    let session = &state["plimsoll.session"];
    assert!(session.len() == 16 && session.bytes().all(|byte| byte.is_ascii_hexdigit()), "{session}");
    bench.nothing_is_held();
    let other = bench.held();
    assert_eq!(bench.piece(other, br#"{"user": "ann", "steps": 1e13}"#, true), Course::GoesOn);
    let state = bench.state(other);
    assert_eq!(&state["plimsoll.session"], session);
    assert_eq!(state["plimsoll.cost"], "1000000000000");
    assert!(!state.contains_key("plimsoll.class") && !state.contains_key("plimsoll.model"));
}

#[test]
fn only_what_may_be_a_json_body_is_held() {
    let mut bench = Bench::new(r#", "max_body_bytes": 1000"#);
    assert_eq!(bench.request(&[(":method", "GET")], true).1, Course::GoesOn);
    let mut is_held = |headers: &[(&str, &str)]| bench.request(headers, false).1 == Course::Held;
    assert!(is_held(&[]));
    assert!(is_held(&[("content-length", "1000"), ("content-type", "application/json; charset=utf-8")]));
    assert!(is_held(&[("content-type", "text/grpc"), ("expect", "100-continue")]));
    for headers in [
        ("content-length", "1001"),
        ("content-length", "99999999999999999999999"),
        ("content-length", "-1"),
        ("content-length", ""),
        ("upgrade", "websocket"),
        (":method", "CONNECT"),
        ("content-encoding", "gzip"),
        ("content-encoding", "identity"),
        ("content-type", "application/grpc"),
        ("content-type", "Application/gRPC+proto"),
        ("content-type", "application/grpc-web"),
    ] {
        assert!(!is_held(&[headers]), "{headers:?}");
    }
    bench.host.refuse(Call::Header, 1);
    assert_eq!(bench.request(&[], false).1, Course::GoesOn);
}

#[test]
fn a_body_that_is_not_json_goes_on_with_its_first_byte() {
    for first in [&b"x"[..], b" \r\n\t\"", b"--boundary", b"\xef\xbb\xbf{", b"1", b"\0", b"\x0b{"] {
        let mut bench = Bench::new("");
        let id = bench.held();
        assert_eq!(bench.piece(id, b" ", false), Course::Held);
        assert_eq!(bench.piece(id, first, false), Course::GoesOn, "{first:?}");
        bench.nothing_is_held();
        assert_eq!(bench.piece(id, b"{\"size\": 1}", true), Course::GoesOn);
        assert_eq!(bench.class(id), None);
    }
}

#[test]
fn a_body_that_is_too_large_goes_on_with_the_piece_that_makes_it_so() {
    let mut bench = Bench::new(r#", "max_body_bytes": 20"#);
    let id = bench.held();
    assert_eq!(bench.piece(id, br#"{"size": "#, false), Course::Held);
    assert_eq!(bench.piece(id, br#"1         }"#, true), Course::GoesOn);
    assert_eq!(bench.class(id).as_deref(), Some("1"), "20 bytes are not too many");
    let id = bench.held();
    assert_eq!(bench.piece(id, br#"{"size": "#, false), Course::Held);
    assert_eq!(bench.piece(id, br#"1          }"#, true), Course::GoesOn);
    let other = bench.held();
    assert_eq!(bench.piece(other, &[b' '; 21], false), Course::GoesOn);
    assert_eq!((bench.class(id), bench.class(other)), (None, None));
    bench.nothing_is_held();
}

#[test]
fn trailers_end_a_body() {
    let mut bench = Bench::new("");
    let id = bench.held();
    assert_eq!(bench.piece(id, br#"{"size": 7}"#, false), Course::Held);
    bench.desk.trailers(id);
    assert_eq!(bench.class(id).as_deref(), Some("7"));
    let empty = bench.held();
    bench.desk.trailers(empty);
    let unknown = 999;
    bench.desk.trailers(unknown);
    bench.nothing_is_held();
    let empty = bench.held();
    assert_eq!(bench.piece(empty, b"", true), Course::GoesOn);
    assert_eq!(bench.state(empty), BTreeMap::new());
}

#[test]
fn a_client_that_goes_away_leaves_nothing_behind() {
    let mut bench = Bench::new("");
    let id = bench.held();
    bench.piece(id, b"{\"size\"", false);
    bench.desk.done(id);
    bench.desk.done(id);
    bench.nothing_is_held();
    assert_eq!(bench.piece(id, b": 1}", true), Course::GoesOn);
}

#[test]
fn a_request_that_is_quiet_for_too_long_goes_on_once() {
    let mut bench = Bench::new("");
    let (quiet, slow) = (bench.held(), bench.held());
    assert_eq!(bench.host.pace_of(ROOT), Some(TICK));
    bench.piece(quiet, b"{", false);
    for _ in 0..4 {
        bench.tick(MOST_QUIET_TICKS - 1);
        assert_eq!(bench.piece(slow, b"  ", false), Course::Held);
    }
    assert_eq!((bench.resumed(quiet), bench.resumed(slow)), (1, 0));
    assert_eq!(bench.piece(quiet, b"\"size\": 1}", true), Course::GoesOn);
    assert_eq!(bench.piece(slow, b"{\"size\": 2}", true), Course::GoesOn);
    assert_eq!((bench.class(quiet), bench.class(slow).as_deref()), (None, Some("2")));
    bench.tick(1);
    assert_eq!(bench.host.pace_of(ROOT), Some(Duration::ZERO), "nobody is held, and nobody ticks");
    bench.held();
    assert_eq!(bench.host.pace_of(ROOT), Some(TICK));
    assert_eq!(bench.host.logged(), [""; 0]);
}

#[test]
fn a_request_that_envoy_does_not_let_go_is_tried_again_and_one_that_has_gone_is_forgotten() {
    let mut bench = Bench::new("");
    let (id, gone) = (bench.held(), bench.held());
    bench.host.forget(gone);
    bench.host.refuse(Call::Resume, 2);
    bench.tick(MOST_QUIET_TICKS + 2);
    assert_eq!((bench.resumed(id), bench.desk.held.len()), (0, 1));
    bench.tick(1);
    assert_eq!(bench.resumed(id), 1);
    bench.nothing_is_held();
    bench.tick(MOST_QUIET_TICKS + 1);
}

#[test]
fn where_no_body_ever_comes_a_line_says_what_may_be_missing() {
    let mut bench = Bench::new("");
    for _ in 0..2 {
        bench.held();
        bench.tick(MOST_QUIET_TICKS + 1);
    }
    assert_eq!(bench.host.logged().len(), 1);
    assert!(bench.host.logged()[0].contains("allow_on_headers_stop_iteration"));
}

#[test]
fn no_more_than_a_few_go_on_in_one_callback() {
    let mut bench = Bench::new("");
    let ids: Vec<u32> = (0..70).map(|_| bench.held()).collect();
    let resumed = |bench: &Bench| ids.iter().map(|id| bench.resumed(*id)).sum::<u32>();
    bench.tick(MOST_QUIET_TICKS);
    assert_eq!(resumed(&bench), 0);
    for expected in [32, 64, 70] {
        bench.tick(1);
        assert_eq!(resumed(&bench), expected);
    }
}

#[test]
fn each_root_ticks_for_its_own_requests() {
    let mut bench = Bench::new("");
    let id = bench.held();
    for _ in 0..20 {
        bench.desk.tick(ROOT + 1);
    }
    assert_eq!(bench.resumed(id), 0);
    bench.desk.root_ends(ROOT + 1);
    bench.tick(MOST_QUIET_TICKS + 1);
    assert_eq!(bench.resumed(id), 1);
}

#[test]
fn whoever_holds_most_goes_on_when_too_much_is_held() {
    let mut bench = Bench::new(r#", "max_body_bytes": 16777216"#);
    let small = bench.held();
    bench.piece(small, b"{\"size\": 1", false);
    let megabytes = |count: usize| [b"{".as_slice(), &vec![b' '; (count << 20) - 1]].concat();
    let large: Vec<u32> = (0..4).map(|_| bench.held()).collect();
    for (index, id) in large.iter().enumerate() {
        assert_eq!(bench.piece(*id, &megabytes([14, 16, 15, 14][index]), false), Course::Held);
    }
    assert!(bench.desk.bytes <= MOST_HELD);
    let (other, resumed) = (bench.held(), |bench: &Bench| large.iter().map(|id| bench.resumed(*id)).collect::<Vec<_>>());
    assert_eq!(bench.piece(other, &megabytes(6), false), Course::Held);
    assert_eq!(resumed(&bench), [0, 1, 0, 0]);
    // One that would itself hold most goes on at once, and nobody else does for it.
    let greedy = bench.held();
    assert_eq!(bench.piece(greedy, &megabytes(16), false), Course::GoesOn);
    assert_eq!(resumed(&bench), [0, 1, 0, 0]);
    assert_eq!(bench.piece(small, b"}", true), Course::GoesOn);
    assert_eq!(bench.class(small).as_deref(), Some("1"));
    // Where Envoy does not let the largest go, the one that comes does.
    bench.piece(other, b" ", false);
    bench.host.refuse(Call::Resume, 1);
    let last = bench.held();
    assert_eq!(bench.piece(last, &megabytes(15), false), Course::GoesOn);
    for id in large.into_iter().chain([other]) {
        bench.desk.done(id);
    }
    bench.nothing_is_held();
}

#[test]
fn refused_hostcalls_cost_the_class_and_nothing_else() {
    let mut bench = Bench::new("");
    let id = bench.held();
    bench.host.refuse(Call::Body, 1);
    assert_eq!(bench.piece(id, b"{\"size\": 1}", true), Course::GoesOn);
    let other = bench.held();
    bench.host.refuse(Call::State, 1);
    assert_eq!(bench.piece(other, b"{\"size\": 1, \"steps\": 3}", true), Course::GoesOn);
    assert_eq!((bench.class(id), bench.class(other)), (None, None));
    assert_eq!(bench.state(other)["plimsoll.cost"], "3", "each value is passed on by itself");
    bench.nothing_is_held();
}

/// What happens to one of the requests.
#[derive(Clone, Debug)]
enum Event {
    Piece(usize, Vec<u8>, bool),
    Trailers(usize),
    Done(usize),
    Tick,
    Refused(Call),
}

fn event() -> impl Strategy<Value = Event> {
    let piece = prop_oneof![
        Just(b"{\"size\": ".to_vec()),
        Just(b"1".to_vec()),
        Just(b"}".to_vec()),
        prop::collection::vec(any::<u8>(), 0..9)
    ];
    prop_oneof![
        6 => (0usize..4, piece, prop::bool::weighted(0.3)).prop_map(|(which, piece, ends)| Event::Piece(which, piece, ends)),
        1 => (0usize..4).prop_map(Event::Trailers),
        1 => (0usize..4).prop_map(Event::Done),
        3 => Just(Event::Tick),
        1 => prop_oneof![Just(Call::Body), Just(Call::State), Just(Call::Resume), Just(Call::Header)].prop_map(Event::Refused),
    ]
}

proptest! {
    #[test]
    fn whatever_comes_a_request_goes_on_once_and_the_books_are_right(events in prop::collection::vec(event(), 0..80)) {
        let mut bench = Bench::new(r#", "max_body_bytes": 30"#);
        let mut ids: Vec<u32> = (0..4).map(|_| bench.held()).collect();
        for event in events {
            match event {
                Event::Piece(which, piece, ends) => {
                    let was_held = bench.desk.held.contains_key(&ids[which]);
                    let course = bench.piece(ids[which], &piece, ends);
                    prop_assert_eq!(bench.desk.held.contains_key(&ids[which]), course == Course::Held);
                    prop_assert!(was_held || course == Course::GoesOn);
                    prop_assert!(!ends || course == Course::GoesOn);
                }
                Event::Trailers(which) => bench.desk.trailers(ids[which]),
                Event::Done(which) => {
                    bench.desk.done(ids[which]);
                    bench.host.forget(ids[which]);
                    let (id, _) = bench.request(&[], false);
                    ids[which] = id;
                }
                // The fake host fails if it is asked twice to let one go on.
                Event::Tick => bench.tick(1),
                Event::Refused(call) => bench.host.refuse(call, 1),
            }
            let bytes: usize = bench.desk.held.values().map(|held| held.body.len()).sum();
            prop_assert_eq!(bench.desk.bytes, bytes);
            prop_assert!(bench.desk.held.values().all(|held| held.body.len() <= 30));
        }
        bench.host.heal();
        bench.tick(MOST_QUIET_TICKS + 1);
        bench.nothing_is_held();
    }
}
