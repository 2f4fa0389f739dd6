//! `scripts/top`, in a terminal and piped: in front of a real Envoy, and of pages that no Envoy would serve.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use serde_json::{Value, json};
use support::{AdminPage, Envoy, Fleet, Gpu, Page, Target, Terminal, eventually};
use tokio::net::{TcpListener, TcpStream};

use crate::ejection::eject;

/// A command of the repository's `scripts`.
pub fn script(name: &str) -> Command {
    Command::new(format!("{}/../scripts/{name}", env!("CARGO_MANIFEST_DIR")))
}

fn top(page: &impl Target) -> Command {
    let mut command = script("top");
    command.arg(format!("http://{}", page.address())).env_remove("NO_COLOR");
    command
}

/// Runs it piped, beside the runtime.
pub async fn piped(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().expect("it starts")).await.expect("it ends")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A page with so many hosts, of which each tenth is ejected.
fn page_of(hosts: usize, jobs: u64) -> Value {
    let host = |n: usize| {
        let is_ejected = n % 10 == 9;
        json!({
            "address": format!("10.0.{}.{}:8188", n / 250, n % 250 + 1), "state": if is_ejected { "ejected" } else { "serving" },
            "in_flight": n % 5, "max_in_flight": 4, "ewma_ms": 500.0, "score": 1.25, "ejected_for_ms": if is_ejected { 8000 } else { 0 },
            "busy_for_ms": 0, "requests": jobs * (1 + n as u64 % 3), "failures": n % 7, "speed": 1.0,
        })
    };
    json!({"pools": {"gpu": {
        "policy": "least_time", "hosts": (0..hosts).map(host).collect::<Vec<_>>(), "eligible": hosts - hosts / 10, "slots": 4 * (hosts - hosts / 10), "waiting": 3, "workers": 2, "drift": 0,
        "queue": {"high": 1, "normal": 2, "low": 0, "longest_wait_ms": 1234, "max_length": 1000}, "discovery": null,
        "recent": [{"ago_ms": 2000, "event": "ejected", "host": "10.0.0.10:8188", "reason": "failures", "for_ms": 10000}],
    }}})
}

fn shown(page: &Value) -> Page {
    Page::text(page.to_string())
}

/// Leads to one Envoy's status page after another, as a port does on which Envoy is started again.
struct Front {
    address: SocketAddr,
    target: Arc<Mutex<Option<SocketAddr>>>,
}

impl Target for Front {
    fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Front {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (address, target) = (listener.local_addr().expect("bound"), Arc::new(Mutex::new(None)));
        let at = target.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target: Option<SocketAddr> = *at.lock().unwrap();
                let Some(target) = target else { continue };
                tokio::spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Self { address, target }
    }

    fn lead_to(&self, target: Option<SocketAddr>) {
        *self.target.lock().unwrap() = target;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_shows_an_ejection_a_queue_that_fills_and_an_envoy_that_is_started_again() {
    let fleet = Fleet::start(3, Gpu::new().slots(100).work_ms(60_000)).await;
    let setup = || {
        Envoy::new("http2.yaml")
            .hosts(&fleet)
            .pool(json!({"max_in_flight": 4, "queue": {}, "failure": {"base_ejection_ms": 60_000}}))
    };
    let (front, envoy) = (Front::start().await, setup().start().await);
    front.lead_to(Some(envoy.listener("status")));
    let mut terminal = Terminal::start(&mut top(&front), (100, 30));
    terminal.until("three hosts serve", |screen| screen.text().matches(" serving ").count() == 3).await;
    eject(&envoy, &fleet, 1).await;
    let ejected = fleet.addresses()[1].to_string();
    let screen =
        terminal.until("one is ejected", |screen| screen.line(&ejected).is_some_and(|line| line.contains(" ejected "))).await;
    assert!(screen.line("2 of 3 hosts take jobs").is_some(), "{}", screen.text());
    let mut jobs = Vec::new();
    for _ in 0..10 {
        jobs.push(envoy.client().post("/prompt", "{}").start().await);
    }
    let screen = terminal
        .until("the queue fills", |screen| screen.line("waiting: 2 of at most 1000 (0 high, 2 normal, 0 low)").is_some())
        .await;
    assert!(
        screen.line("8/8 slots taken, 4 more are out").is_some() && screen.text().contains(" 4/4 ██████████ serving"),
        "{}",
        screen.text()
    );
    let once = piped(top(&front)).await;
    let page = text(&once.stdout);
    assert!(once.status.success() && !page.contains('\u{1b}'), "{page}");
    // Its row, and what happened.
    let told: Vec<&str> = page.lines().filter(|line| line.contains(" ejected ")).collect();
    let [row, event] = told[..] else { panic!("{page}") };
    assert!(row.starts_with(&format!("{ejected} ")) && event.contains(&format!(" ago ejected {ejected}: failures")), "{page}");
    drop((jobs, envoy));
    let screen = terminal
        .until("it says that Envoy is away", |screen| screen.text().contains("trying again; below is what it said"))
        .await;
    assert!(screen.line(&ejected).is_some(), "{}", screen.text());
    let envoy = setup().start().await;
    front.lead_to(Some(envoy.listener("status")));
    let screen = terminal.until("it is back", |screen| screen.text().matches(" serving ").count() == 3).await;
    assert!(!screen.text().contains("trying again"), "{}", screen.text());
    terminal.keys("q");
    assert!(terminal.end().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn it_shows_what_is_worth_seeing_of_256_hosts_in_a_window_of_any_size() {
    let page = AdminPage::start().await;
    page.show(shown(&page_of(256, 0)));
    for (columns, rows) in [(200, 60), (80, 24), (40, 10), (20, 5), (3, 2)] {
        let terminal = Terminal::start(&mut top(&page), (columns, rows));
        page.asked_again(2).await;
        let is_drawn = |screen: &support::terminal::Screen| columns < 20 || screen.text().contains("gpu: ");
        let screen = terminal.until("it is drawn", is_drawn).await;
        assert!(!screen.overflowed, "{columns}×{rows}:\n{}", screen.text());
        if columns < 40 {
            continue;
        }
        let lines = screen.lines();
        let hosts: Vec<&String> = lines.iter().filter(|line| line.starts_with("10.0.")).collect();
        assert!(hosts.len() >= usize::from(rows) / 2 && hosts[0].contains("ejected"), "{columns}×{rows}:\n{}", screen.text());
        let hidden = screen.line("more hosts").unwrap_or_else(|| panic!("none is left out:\n{}", screen.text()));
        let hidden: usize = hidden.split(' ').nth(1).and_then(|number| number.parse().ok()).expect("a number");
        assert_eq!(hosts.len() + hidden, 256, "{}", screen.text());
    }
    let mut terminal = Terminal::start(&mut top(&page), (80, 24));
    terminal.until("it fits", |screen| screen.line("more hosts").is_some() && !screen.lines()[23].is_empty()).await;
    terminal.resize(120, 270);
    terminal
        .until("all of them do", |screen| screen.line("more hosts").is_none() && screen.line("10.0.1.6:8188").is_some())
        .await;
    // Where there is no room for all pools, one says how many are left out.
    let mut several = page_of(3, 0);
    let pool = several["pools"]["gpu"].clone();
    ["b", "c"].into_iter().for_each(|name| several["pools"][name] = pool.clone());
    page.show(shown(&several));
    terminal.resize(80, 9);
    let screen = terminal.until("one pool", |screen| screen.line("and 2 more pools").is_some()).await;
    assert!(
        screen.line("b: least_time").is_some_and(|line| line.starts_with("b: ")) && screen.line("10.0.0.2:8188").is_some(),
        "{}",
        screen.text()
    );
    terminal.keys("pp");
    terminal.until("another", |screen| screen.line("c: least_time").is_some() && screen.line("more pools").is_none()).await;
    terminal.keys("sss");
    terminal.until("they are sorted", |screen| screen.lines()[0].contains("slowest")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eighty_columns_show_how_each_host_is_and_cut_no_value() {
    let page = AdminPage::start().await;
    let mut pool = page_of(12, 0);
    pool["pools"]["gpu"]["hosts"][9]["score"] = 123_456.0.into();
    for (address, expected) in [
        ("10.0.0.10:8188", "4/4 ████ ejected 8.0 s 500 ms 2 123456 1.00"),
        ("192.168.100.10:18188", "4/4 ejected 8.0 s 500 ms 2 123456 1.00"),
    ] {
        pool["pools"]["gpu"]["hosts"][9]["address"] = address.into();
        page.show(shown(&pool));
        let terminal = Terminal::start(&mut top(&page), (80, 24));
        let screen = terminal.until("it is drawn", |screen| screen.line(address).is_some()).await;
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (head, row) = (screen.line("in flight").expect("a head"), screen.line(&format!("{address} ")).expect("a row"));
        assert_eq!(words(&head), "host in flight state latency failed score speed", "{}", screen.text());
        assert_eq!(words(&row), format!("{address} {expected}"), "{}", screen.text());
        let title = screen.line("gpu: ").expect("a title");
        assert!(title.ends_with(" · 17/44 slots taken, 4 more are out"), "{title}");
        let first = &screen.lines()[0];
        assert!(first.ends_with("p pool") && first.contains("as listed"), "{first}");
    }
    // A drift is the last thing to be left out.
    pool["pools"]["gpu"]["drift"] = 7.into();
    page.show(shown(&pool));
    let mut terminal = Terminal::start(&mut top(&page), (60, 24));
    terminal
        .until("it is drawn", |screen| {
            screen.line("gpu: ").is_some_and(|title| title == "gpu: least_time · drift 7 · 11 of 12 hosts take jobs")
        })
        .await;
    terminal.keys("s");
    terminal.until("its name is whole", |screen| screen.lines()[0].ends_with("trouble first")).await;
}

/// Runs `scripts/top` without a URL, in a checkout that has nothing but it and what a `scripts/run` has written.
async fn top_of(checkout: &Path) -> Output {
    let scripts = checkout.join("scripts");
    std::fs::create_dir_all(&scripts).expect("our own directory");
    for name in ["top", "endpoints.py"] {
        std::fs::copy(script(name).get_program(), scripts.join(name)).expect("it is there");
    }
    piped(Command::new(scripts.join("top"))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_url_it_shows_the_run_of_its_checkout_while_that_runs() {
    let (page, checkout) = (AdminPage::start().await, tempfile::tempdir().expect("a temporary directory"));
    let mut pools = page_of(1, 0);
    pools["pools"]["of_this_run"] = pools["pools"]["gpu"].take();
    pools["pools"].as_object_mut().expect("an object").remove("gpu");
    page.show(shown(&pools));
    let run = checkout.path().join(".run");
    std::fs::create_dir(&run).expect("our own directory");
    let listener = format!(
        "  - name: status\n    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }}\n",
        page.address().port()
    );
    std::fs::write(run.join("envoy.yaml"), listener).expect("our own file");
    let lock = std::fs::File::create(run.join("lock")).expect("our own file");
    let shows_it = |output: &Output| text(&output.stdout).contains("of_this_run: least_time");
    // What an earlier run has left says nothing.
    assert!(!shows_it(&top_of(checkout.path()).await));
    lock.lock().expect("nobody else has it");
    let output = top_of(checkout.path()).await;
    assert!(shows_it(&output), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_leaves_the_terminal_as_it_was_however_it_ends() {
    let page = AdminPage::start().await;
    page.show(shown(&page_of(4, 0)));
    for how in ["q", "\u{3}", "TERM", "HUP"] {
        let mut terminal = Terminal::start(&mut top(&page), (80, 24));
        let screen = terminal.until("it is drawn", |screen| screen.text().contains("gpu: ")).await;
        assert!(screen.is_set("?1049") && !screen.is_set("?25") && !screen.is_set("?7"));
        match how {
            "TERM" => terminal.signal(Signal::TERM),
            "HUP" => terminal.signal(Signal::HUP),
            keys => terminal.keys(keys),
        }
        let status = terminal.end().await;
        let code = [("q", 0), ("\u{3}", 130), ("TERM", 143), ("HUP", 129)]
            .into_iter()
            .find(|(one, _)| *one == how)
            .map(|(_, code)| code);
        assert_eq!(status.code(), code, "{how:?}");
        terminal
            .until("the screen is the shell's", |screen| !screen.is_set("?1049") && screen.is_set("?25") && screen.is_set("?7"))
            .await;
        assert!(!terminal.screen().written.contains("Traceback"), "{}", terminal.screen().written);
    }
    // Ctrl-Z gives the terminal back, and the next look takes it again. (Nobody is there who would let a program that has stopped go on, so it does not stop.)
    let mut terminal = Terminal::start(&mut top(&page), (80, 24));
    terminal.until("it is drawn", |screen| screen.text().contains("gpu: ")).await;
    terminal.keys("\u{1a}");
    let turns = |screen: &support::terminal::Screen, end: &str| screen.written.matches(&format!("\u{1b}[?1049{end}")).count();
    terminal.until("it is suspended, and goes on", |screen| (turns(screen, "l"), turns(screen, "h")) == (1, 2)).await;
    terminal.until("it is drawn again", |screen| screen.is_set("?1049") && screen.text().contains("gpu: ")).await;
    // A page that hangs holds up no key.
    page.show(Page::hang());
    page.asked_again(1).await;
    terminal.keys("q");
    assert!(terminal.end().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_says_does_nothing_to_the_terminal() {
    let page = AdminPage::start().await;
    let evil = "\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}31m\u{202e}\r\n";
    let mut hostile = page_of(2, 0);
    let pool = &mut hostile["pools"]["gpu"];
    pool["policy"] = evil.into();
    pool["hosts"][0]["address"] = evil.into();
    pool["hosts"][0]["state"] = evil.into();
    pool["hosts"][1] = json!({"address": [evil], "state": null, "in_flight": "many", "max_in_flight": -3, "ewma_ms": 1e308, "score": evil, "requests": {}});
    pool["recent"] = json!([{"ago_ms": "x", "event": evil, "host": evil, "reason": evil, "for_ms": evil}, {}]);
    hostile["pools"][evil] = pool.clone();
    page.show(shown(&hostile));
    let output = piped(top(&page)).await;
    let plain = text(&output.stdout);
    assert!(output.status.success() && plain.contains("?[2J"), "{plain}{}", text(&output.stderr));
    assert_eq!(plain.chars().filter(|char| char.is_control() && *char != '\n' || *char == '\u{202e}').count(), 0, "{plain:?}");
    let terminal = Terminal::start(top(&page).env("NO_COLOR", "1"), (120, 24));
    let screen = terminal.until("it is drawn", |screen| screen.text().contains("?[2J")).await;
    let odd = ["\u{1b}]", "\u{7}", "\u{9b}", "\u{202e}"].into_iter().find(|odd| screen.written.contains(odd));
    assert_eq!(odd, None);
    assert!(!screen.written.contains("\u{1b}[3"), "NO_COLOR: {:?}", screen.written);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_status_page_is_one_clear_line_when_piped_and_in_a_terminal_it_goes_on() {
    let page = AdminPage::start().await;
    let pages = [
        (Page::text("<html>"), "is not JSON"),
        (shown(&page_of(2, 0)).cut(), "is not JSON"),
        (Page::text("[".repeat(100_000)), "is not JSON"),
        (Page::text("{\"pools\": [1]}"), "but not Plimsoll's /status.json"),
        (Page::text("{\"pools\": {\"gpu\": {\"hosts\": [1]}}}"), "but not Plimsoll's /status.json"),
        (Page::text("null"), "but not Plimsoll's /status.json"),
        (shown(&page_of(2, 0)).status(503), "answered 503"),
    ];
    let refused = async |command: Command, expected: &str| {
        let output = piped(command).await;
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count(), text(&output.stdout).as_str()), (Some(1), 1, ""), "{said}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{said:?} has no {expected:?}");
    };
    for (answer, expected) in pages {
        page.show(answer);
        refused(top(&page), expected).await;
    }
    let terminal = Terminal::start(&mut top(&page), (100, 24));
    terminal.until("it says so", |screen| screen.text().contains("answered 503")).await;
    page.show(shown(&page_of(2, 0)));
    terminal.until("it goes on", |screen| screen.text().contains("gpu: ") && !screen.text().contains("503")).await;
    page.close().await;
    refused(top(&page), "Connection refused").await;
    for (arguments, expected) in [
        (&["nowhere:99999"][..], "is not a URL"),
        (&["http:// x"], "is not a URL"),
        (&["ftp://127.0.0.1"], "is not a URL"),
        (&["--sideways"], "no such option"),
        (&["--watch", "0"], "is not a whole number of seconds"),
        (&["--watch", "1", "--once"], "not both"),
        (&["127.0.0.1:1", "127.0.0.1:2"], "one URL is enough"),
    ] {
        let mut command = script("top");
        command.args(arguments);
        refused(command, expected).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_and_rates_are_of_what_came_between_and_a_watch_goes_on_while_envoy_is_away() {
    let page = AdminPage::start().await;
    page.show(shown(&page_of(4, 1000)));
    let mut command = top(&page);
    command.args(["--watch", "1"]);
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let mut child = command.stdout(file.reopen().expect("a handle")).spawn().expect("it starts");
    let written = || std::fs::read_to_string(file.path()).expect("our own file");
    page.asked_again(1).await;
    page.show(shown(&page_of(4, 1010)));
    eventually("a look", async || written().contains("10.0.0.4:8188")).await;
    // 10, 20, 30 and 10 jobs.
    let shares: Vec<String> = written()
        .lines()
        .filter(|line| line.starts_with("10."))
        .map(|line| line.split_whitespace().nth(6).unwrap_or("").to_owned())
        .collect();
    assert_eq!(shares, ["14%", "29%", "43%", "14%"], "{}", written());
    page.close().await;
    eventually("it says that nobody is there", async || written().contains("Connection refused; trying again")).await;
    // Another Envoy counts from 0: no rates until there are two looks at it.
    page.show(shown(&page_of(4, 5)));
    page.open().await;
    eventually("it goes on", async || {
        written().rsplit_once("trying again").is_some_and(|(_, after)| after.contains("10.0.0.4:8188"))
    })
    .await;
    let after = written().rsplit_once("trying again").map(|(_, after)| after.to_owned()).expect("found above");
    assert!(!after.contains("-1"), "{after}");
    child.kill().expect("our own child");
    child.wait().expect("our own child");
}
