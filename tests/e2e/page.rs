//! The status page, in a real browser.
//!
//! Ignored unless there is one: `scripts/test` fetches Debian's Chromium, and runs these too. By hand:
//! `. scripts/tools; need_browser; cargo test -p plimsoll-tests page -- --include-ignored`. With `PLIMSOLL_PICTURES=DIR` they leave pictures there.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::load::Ongoing;
use support::{Browser, Envoy, Fault, Fleet, Gpu, Load, RunningEnvoy, Tab, View, eventually};
use tokio::net::{TcpListener, TcpStream};

use crate::ejection::eject;

const DESKTOP: (u32, u32) = (1280, 900);

fn desktop() -> View {
    View::window(DESKTOP.0, DESKTOP.1)
}

async fn open(browser: &Browser, envoy: &RunningEnvoy, view: View) -> Tab {
    browser.open(&format!("http://{}/", envoy.listener("status")), view).await
}

/// Leaves a picture, where pictures are wanted.
async fn picture(tab: &Tab, name: &str) {
    if let Some(directory) = std::env::var_os("PLIMSOLL_PICTURES").map(PathBuf::from) {
        // Until the water stands still.
        tokio::time::sleep(Duration::from_secs(1)).await;
        tab.picture(&directory.join(format!("{name}.png"))).await;
    }
}

/// What the page shows of each host, in the form of [`of_json`].
async fn columns(tab: &Tab) -> Value {
    tab.eval(
        "[...document.querySelectorAll('.host')].map(host => ({
            address: host.querySelector('.name').textContent, state: host.querySelector('.word').textContent,
            colour: getComputedStyle(host.querySelector('.word')).color,
            count: host.querySelector('.count').textContent, fill: Number(host.querySelector('.water').style.getPropertyValue('--fill')).toFixed(3),
        }))",
    )
    .await
}

/// The same from the JSON: all but the colour.
fn of_json(books: &[Value]) -> Vec<Value> {
    let column = |host: &Value| {
        let (busy, slots) = (host["in_flight"].as_u64().expect("a count"), host["max_in_flight"].as_u64().expect("a count"));
        json!({"address": host["address"], "state": host["state"], "count": format!("{busy} / {slots}"), "fill": format!("{:.3}", busy as f64 / slots as f64)})
    };
    books.iter().map(column).collect()
}

fn without_colour(columns: &Value) -> Vec<Value> {
    let columns = columns.as_array().expect("columns").clone();
    columns
        .into_iter()
        .map(|mut column| column.as_object_mut().expect("a column").remove("colour").map_or(Value::Null, |_| column))
        .collect()
}

/// Waits until the page shows of each host what the JSON says.
async fn shows_what_the_json_says(tab: &Tab, envoy: &RunningEnvoy) {
    let mut seen = (Vec::new(), Vec::new());
    let deadline = Instant::now() + support::DEADLINE;
    while seen.0.is_empty() || seen.0 != seen.1 {
        let unlike = seen.0.iter().zip(&seen.1).filter(|(page, json)| page != json);
        assert!(Instant::now() < deadline, "the page and the JSON differ: {:?}", unlike.collect::<Vec<_>>());
        seen = (without_colour(&columns(tab).await), of_json(&envoy.books().await));
    }
}

/// Jobs that do not end.
async fn hold(envoy: &RunningEnvoy, jobs: usize, priority: &str) -> Vec<Ongoing> {
    let mut held = Vec::new();
    for _ in 0..jobs {
        let job = envoy.client().post("/prompt", "{}").header("x-sim-ms", "600000").header("x-job-priority", priority);
        held.push(job.start().await);
    }
    held
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn the_page_draws_each_host_and_what_waits_as_the_json_has_it_and_goes_on_by_itself() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let mut hosts: Vec<Value> = fleet.addresses().iter().map(|at| json!({"address": at.to_string()})).collect();
    hosts[3]["drain"] = json!(true);
    let pool = json!({"hosts": hosts, "max_in_flight": 2, "queue": {"max_length": 9, "timeout_ms": 600_000}, "priority": {"header": "x-job-priority"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).keys(json!({"trusted_headers": true})).pool(pool).start().await;
    eventually("the first tick makes the books", async || !envoy.pool_status().await.is_null()).await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("the picture of an idle pool", "document.querySelectorAll('.host').length === 4").await;
    assert_eq!(tab.text(".sentence").await, "3 of 4 hosts take jobs; 0 of their 6 slots are busy; nothing waits.");
    assert_eq!(tab.text(".pool:not(#none) h2").await, "gpu");
    assert_eq!(tab.text("#version").await, envoy.status().await["version"]);
    shows_what_the_json_says(&tab, &envoy).await;

    let _running = hold(&envoy, 6, "normal").await;
    envoy.until_pool("they run", |pool| pool["in_flight"] == 6).await;
    let _waiting = [hold(&envoy, 2, "high").await, hold(&envoy, 1, "low").await];
    envoy.until_pool("they wait", |pool| pool["waiting"] == 3).await;
    tab.until("what waits", "document.querySelector('.sentence').textContent.includes('3 jobs wait, the longest for')").await;
    let sentence = tab.text(".sentence").await;
    assert!(
        sentence.as_str().expect("text").starts_with("3 of 4 hosts take jobs; 6 of their 6 slots are busy; 3 jobs wait, "),
        "{sentence}"
    );
    shows_what_the_json_says(&tab, &envoy).await;
    assert_eq!(
        tab.eval("[...document.querySelectorAll('.lanes > *')].map(one => one.textContent).join(' ')").await,
        "high  2 normal  0 low  1"
    );
    // Of the nine that may wait; and one among thousands is seen, and more than there is room for do not spill.
    let fills = "list => [...list.querySelectorAll('.lane')].map(bar => Number(bar.style.getPropertyValue('--fill')).toFixed(3)).join(' ')";
    assert_eq!(tab.eval(&format!("({fills})(document.querySelector('.lanes'))")).await, "0.222 0.000 0.111");
    let queue =
        "{ high: 1, normal: 0, low: 7000, max_length: 5000, longest_wait_ms: 0, served: 0, full: 0, timed_out: 0, left: 0 }";
    let show = format!("(queue => {{ queue.show({{ queue: {queue} }}); return ({fills})(queue.list); }})(new Queue())");
    assert_eq!(tab.eval(&show).await, "0.020 0.000 1.000");
    assert_eq!(tab.text(".hull b").await, "100 %");
    // Colours tell states apart, and so do words.
    let columns = columns(&tab).await;
    assert_ne!(columns[0]["colour"], columns[3]["colour"]);
    picture(&tab, "four").await;
    assert_eq!(tab.complaints(), [""; 0]);
    let own = format!("http://{}/", envoy.listener("status"));
    assert!(
        tab.requests().len() >= 3 && tab.requests().iter().all(|url| url.starts_with(&own) || url.starts_with("data:")),
        "{:?}",
        tab.requests()
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn an_ejection_is_on_the_page_within_two_seconds_of_its_being_in_the_json_and_so_is_what_went_before() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("the picture", "document.querySelectorAll('.host').length === 4").await;
    fleet[1].set(Fault::status(500).after(Duration::from_millis(300)));
    Load::burst(16).header("x-sim-ms", "300").run(&envoy).await;
    envoy.until_state(1, "ejected").await;
    let began = Instant::now();
    tab.until("the ejection", "document.querySelectorAll('.host')[1].dataset.state === 'ejected'").await;
    assert!(began.elapsed() < Duration::from_secs(2), "after {:?}", began.elapsed());
    let told = format!("{} ejected for", fleet[1].address());
    tab.until("what happened", &format!("document.querySelector('.log').textContent.includes({told:?})")).await;
    assert!(tab.text(".log li").await.as_str().expect("a line").ends_with("failures in a row"));
    // Whoever opens it now sees the same.
    let late = open(&browser, &envoy, desktop()).await;
    late.until("what happened before", &format!("document.querySelector('.log')?.textContent.includes({told:?})")).await;
    late.until("the history", "document.querySelectorAll('.chart path').length > 2").await;
    let pool = envoy.pool_status().await;
    assert_eq!((&pool["recent"][0]["event"], &pool["recent"][0]["reason"]), (&json!("ejected"), &json!("failures")));
    assert_eq!(pool["recent"][0]["host"], fleet[1].address().to_string());
    assert!(
        pool["recent"][0]["failures"].as_u64() >= Some(3) && pool["recent"][0]["for_ms"].as_u64() >= Some(10_000),
        "{}",
        pool["recent"]
    );
    let history = pool["history"].as_array().expect("points");
    let ages: Vec<u64> = history.iter().map(|point| point["ago_ms"].as_u64().expect("an age")).collect();
    assert!(!ages.is_empty() && ages.is_sorted_by(|one, next| one > next), "{ages:?}");
    assert!(
        history.iter().all(|point| point["slots"].as_u64() >= Some(150) && point["eligible"].as_u64() >= Some(3)),
        "{history:?}"
    );
    assert_eq!((tab.complaints(), late.complaints()), (vec![], vec![]));
}

/// Stands before one Envoy after another, on one port.
struct Relay {
    address: SocketAddr,
    to: Arc<Mutex<Option<SocketAddr>>>,
}

impl Relay {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let relay = Self { address: listener.local_addr().expect("bound"), to: Arc::default() };
        let to = relay.to.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *to.lock().expect("not poisoned");
                let Some(target) = target else { continue };
                tokio::spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        relay
    }

    fn leads_to(&self, target: Option<SocketAddr>) {
        *self.to.lock().expect("not poisoned") = target;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn when_envoy_goes_the_page_says_since_when_keeps_its_picture_and_goes_on_with_the_next_one() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let start = async |drained: Option<usize>| {
        let host = |(n, at): (usize, &SocketAddr)| json!({"address": at.to_string(), "drain": drained == Some(n)});
        let hosts: Vec<Value> = fleet.addresses().iter().enumerate().map(host).collect();
        Envoy::new("http2.yaml").hosts(&fleet).pool(json!({"hosts": hosts})).start().await
    };
    let relay = Relay::start().await;
    let envoy = start(None).await;
    relay.leads_to(Some(envoy.listener("status")));
    Load::burst(60).run(&envoy).await.assert_served();
    let browser = Browser::start().await;
    let tab = browser.open(&format!("http://{}/", relay.address), desktop()).await;
    tab.until("the picture", "document.querySelectorAll('.host').length === 2").await;
    Load::burst(60).run(&envoy).await.assert_served();
    let shares =
        "[...document.querySelectorAll('.host dl')].map(facts => facts.children[3].textContent.replaceAll('\\u00a0', ' '))";
    tab.until(
        "shares of traffic",
        &format!("{shares}.length === 2 && {shares}.every(share => share.endsWith('%') && share !== '0 %')"),
    )
    .await;
    let seen = tab.eval("(asked => asked.at(-1).at - asked[0].at)(pools.get('gpu').asked)").await;
    assert!(seen.as_f64() >= Some(5000.0), "shares of {seen} ms");

    relay.leads_to(None);
    drop(envoy);
    tab.until("that contact is lost", "!document.querySelector('#lost').hidden").await;
    let lost = tab.text("#lost").await;
    assert!(
        lost.as_str()
            .is_some_and(|text| text.starts_with("No contact with Envoy since ") && text.contains("This is the last picture")),
        "{lost}"
    );
    assert_eq!(tab.eval("document.querySelectorAll('.host').length").await, 2);
    tab.until("the picture is dimmed", "getComputedStyle(document.querySelector('.pool')).opacity < 0.6").await;
    picture(&tab, "lost").await;
    assert!(tab.complaints().iter().all(|complaint| complaint.contains("ERR_")), "{:?}", tab.complaints());

    // The next one counts from 0, and sends nothing to the second host: differences to what was before would show as shares.
    let envoy = start(Some(1)).await;
    relay.leads_to(Some(envoy.listener("status")));
    tab.until("contact again", "document.querySelector('#lost').hidden && document.body.className === ''").await;
    assert_eq!(tab.eval(&format!("{shares}.join()")).await, "–,–", "nobody can tell yet");
    Load::burst(9).run(&envoy).await.assert_served();
    shows_what_the_json_says(&tab, &envoy).await;
    tab.until("shares of traffic", &format!("{shares}.join() === '100 %,0 %'")).await;
    let text = tab.eval("document.body.innerText").await;
    assert!(
        !["NaN", "undefined", "Infinity", "-1", "null"].iter().any(|word| text.as_str().expect("text").contains(word)),
        "{text}"
    );
    let drawn = tab.eval("[...document.querySelectorAll('.chart path')].map(path => path.getAttribute('d')).join(' ')").await;
    assert!(!drawn.as_str().expect("paths").contains("NaN"), "{drawn}");
}

/// Hosts of which nobody listens: the page only draws them.
fn addresses(hosts: usize) -> Vec<SocketAddr> {
    (0..hosts).map(|host| SocketAddr::from(([127, 8, (host / 250) as u8, (host % 250 + 1) as u8], 8188))).collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn two_hundred_and_fifty_six_hosts_are_found_filtered_and_sorted_also_on_a_phone_and_in_the_dark() {
    let mut hosts: Vec<Value> = addresses(256).iter().map(|at| json!({"address": at.to_string()})).collect();
    for host in [3, 77, 200] {
        hosts[host]["drain"] = json!(true);
    }
    let envoy = Envoy::new("http1.yaml")
        .addresses(&addresses(256))
        .pool(json!({"hosts": hosts, "max_in_flight": 4}))
        .workers(1)
        .start()
        .await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("all of them", "document.querySelectorAll('.host').length === 256").await;
    shows_what_the_json_says(&tab, &envoy).await;
    assert_eq!(tab.text(".sentence").await, "253 of 256 hosts take jobs; 0 of their 1,012 slots are busy.");
    picture(&tab, "many").await;
    // What is not serving is told by its word, too.
    assert_eq!(tab.eval("getComputedStyle(document.querySelectorAll('.host .word')[77]).opacity").await, "1");

    tab.eval("document.querySelector('.tools [data-state=draining]').click()").await;
    tab.until("those that drain", "document.querySelectorAll('.host').length === 3").await;
    tab.eval("document.querySelector('.tools [data-state=draining]').click()").await;
    tab.eval("(search => { search.value = '127.8.1.6:'; search.dispatchEvent(new Event('input')); })(document.querySelector('.tools input'))").await;
    tab.until("the one", "document.querySelectorAll('.host').length === 1").await;
    tab.eval(
        "(search => { search.value = ''; search.dispatchEvent(new Event('input')); })(document.querySelector('.tools input'))",
    )
    .await;
    tab.eval("(order => { order.value = 'worst first'; order.dispatchEvent(new Event('change')); })(document.querySelector('.tools select'))").await;
    tab.until("the worst first", "[...document.querySelectorAll('.host')].slice(0, 4).map(host => host.dataset.state).join() === 'draining,draining,draining,serving'").await;

    let light = tab
        .eval("getComputedStyle(document.body).backgroundColor + getComputedStyle(document.querySelector('.pool')).color")
        .await;
    for (view, name) in
        [(View::phone(), "many-phone"), (View::phone().dark(), "many-phone-dark"), (desktop().dark().still(), "many-dark")]
    {
        tab.look(view).await;
        tab.until("it has its width", &format!("innerWidth === {}", view.size.0)).await;
        assert_eq!(tab.eval("document.documentElement.scrollWidth").await, view.size.0, "{name} scrolls sideways");
        let dark = tab
            .eval("getComputedStyle(document.body).backgroundColor + getComputedStyle(document.querySelector('.pool')).color")
            .await;
        assert_eq!(dark != light, view.is_dark, "{name}");
        picture(&tab, name).await;
    }
    assert_eq!(tab.eval("getComputedStyle(document.querySelector('.hull path.swell')).animationName").await, "none");
    assert_eq!(tab.complaints(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn a_keyboard_is_enough_to_reach_what_is_known_of_any_host() {
    let fleet = Fleet::start(4, Gpu::new().slots(100)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).start().await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("the picture", "document.querySelectorAll('.host').length === 4").await;
    // The legend, then the hosts, which are one stop.
    let focused = "document.activeElement.dataset.address ?? document.activeElement.tagName";
    let mut stops = vec![];
    while stops.len() < 3 {
        tab.press("Tab").await;
        stops.push(tab.eval(focused).await);
    }
    let addresses: Vec<String> = fleet.addresses().iter().map(SocketAddr::to_string).collect();
    assert_eq!(stops, [json!("SUMMARY"), json!(addresses[0]), json!("OL")]);
    assert_eq!(tab.eval("document.querySelector('.facts').hidden").await, true);
    tab.eval("document.querySelector('.host').focus()").await;
    for (key, host) in
        [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 3), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1)]
    {
        tab.press(key).await;
        assert_eq!(tab.eval(focused).await, addresses[host], "after {key}");
    }
    assert_ne!(tab.eval("getComputedStyle(document.activeElement).outlineStyle").await, "none");
    tab.press("Enter").await;
    assert_eq!(tab.text(".facts h3").await, addresses[1]);
    assert_eq!(tab.eval("document.activeElement.getAttribute('aria-selected')").await, "true");
    tab.press("ArrowRight").await;
    assert_eq!(tab.text(".facts h3").await, addresses[2]);
    // It stays while the picture goes on.
    Load::burst(40).run(&envoy).await.assert_served();
    tab.until("its jobs", "[...document.querySelectorAll('.facts dt')].find(dt => dt.textContent === 'jobs placed here').nextSibling.textContent !== '0'").await;
    assert_eq!(tab.eval(focused).await, addresses[2]);
    picture(&tab, "details").await;
    tab.press("Escape").await;
    assert_eq!(tab.eval("document.querySelector('.facts').hidden").await, true);
    assert_eq!(
        tab.eval(&format!(
            "document.querySelector('.host[data-address=\"{}\"]').getAttribute('aria-label').split(',')[0]",
            addresses[2]
        ))
        .await,
        format!("{}: serving", addresses[2])
    );
    assert_eq!(tab.complaints(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn a_host_that_came_back_while_jobs_of_before_run_has_two_columns_and_keys_go_past_both() {
    let fleet = Fleet::start(3, Gpu::new().slots(50)).await;
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(json!({})).live().start().await;
    let held = hold(&envoy, 6, "normal").await;
    envoy.until("two on each", |hosts| hosts.iter().all(|host| host["in_flight"] == 2)).await;
    let hosts: Vec<Value> = fleet.addresses().iter().map(|address| json!({"address": address.to_string()})).collect();
    envoy.reload_pool(json!({"hosts": hosts[1..]})).await.expect("taken up");
    envoy.until("the first leaves", |hosts| hosts.iter().any(|host| host["state"] == "draining")).await;
    envoy.reload_pool(json!({"hosts": hosts})).await.expect("taken up");
    envoy.until("it is back", |hosts| hosts.len() == 4).await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("four columns", "document.querySelectorAll('.host').length === 4").await;
    let names = columns(&tab).await;
    let mut names: Vec<String> = names
        .as_array()
        .expect("columns")
        .iter()
        .map(|column| column["address"].to_string() + &column["count"].to_string())
        .collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names.iter().any(|name| name.contains("(before)") && name.contains("2 / ")), "{names:?}");
    tab.eval("document.querySelector('.host').focus()").await;
    let mut went = Vec::new();
    for _ in 0..4 {
        went.push(tab.eval("[...document.querySelectorAll('.host')].indexOf(document.activeElement)").await);
        tab.press("ArrowRight").await;
    }
    assert_eq!(went, [json!(0), json!(1), json!(2), json!(3)]);
    // What has not changed is not drawn anew.
    tab.eval("window.drawn = 0; new MutationObserver(() => window.drawn++).observe(document.querySelector('.hosts'), {childList: true})").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(tab.eval("window.drawn").await, 0);
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn pools_of_every_kind_have_their_picture_and_names_are_never_markup() {
    let fleet = Fleet::start(2, Gpu::new().slots(100)).await;
    let others = Fleet::start(1, Gpu::new().slots(100)).await;
    let name = "<img src=x onerror=alert(1)>";
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .admin_cluster()
        .second_cluster(name, &others.addresses(), json!({"prefix": "/other"}))
        .keys(json!({"trusted_headers": true, "pools": {
            "gpu": {"queue": null, "policy": "least_time", "class": {"header": "x-job-class"}},
            name: {"discovery": {"cluster": "envoy_admin"}, "policy": "weighted"},
        }}))
        .start()
        .await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until("both pools", "document.querySelectorAll('.pool:not(#none)').length === 2").await;
    for class in ["<b>bold</b>", "film"] {
        envoy.client().post("/prompt", "{}").header("x-job-class", class).await;
    }
    tab.until("the classes", "document.querySelector('.small table')?.textContent.includes('<b>bold</b>')").await;
    tab.until("the other pool's host", "document.querySelectorAll('.host').length === 3").await;
    assert_eq!(tab.eval("document.querySelectorAll('img, .small b').length").await, 0);
    let text = tab.eval("document.body.innerText").await;
    let text = text.as_str().expect("text");
    assert!(
        text.contains(name) && text.contains("follows Envoy’s cluster of 1 host") && text.contains("This pool has no queue"),
        "{text}"
    );
    assert!(!["NaN", "undefined", "Infinity", "null"].iter().any(|word| text.contains(word)), "{text}");
    assert_eq!(tab.complaints(), [""; 0]);
    // A balancer whose shared data the page does not see.
    drop(envoy);
    let envoy = Envoy::new("http2.yaml")
        .hosts(&fleet)
        .edit(|bootstrap| {
            let manager = &mut bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
            manager["http_filters"][1]["typed_config"]["config"]["vm_config"]["vm_id"] = json!("another");
        })
        .start()
        .await;
    let tab = open(&browser, &envoy, desktop()).await;
    tab.until(
        "that there is none",
        "document.querySelector('#none h2').textContent === 'No pool yet' && document.querySelectorAll('.host').length === 0",
    )
    .await;
}

/// For the README: half an hour's work for GPUs, in a few minutes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a browser: see the top of the file"]
async fn a_pool_at_work_has_a_picture_for_the_readme() {
    let is_wanted = std::env::var_os("PLIMSOLL_PICTURES").is_some();
    let length = if is_wanted { 280 } else { 3 };
    let fleet = Fleet::start(8, Gpu::new().slots(4).remember(0)).await;
    let mut hosts: Vec<Value> = fleet.addresses().iter().map(|at| json!({"address": at.to_string()})).collect();
    hosts[6]["drain"] = json!(true);
    let pool = json!({"hosts": hosts, "max_in_flight": 4, "queue": {"max_length": 200, "timeout_ms": 60_000}, "priority": {"header": "x-job-priority"}});
    let envoy = Envoy::new("http2.yaml").hosts(&fleet).keys(json!({"trusted_headers": true})).pool(pool).start().await;
    let browser = Browser::start().await;
    let tab = open(&browser, &envoy, View::window(1280, 940)).await;
    let priorities = ["high", "normal", "normal", "low"];
    let work = |rate: f64, seconds: usize, seed| {
        let jobs = (rate * seconds as f64) as usize;
        Load::poisson(rate, jobs, seed).http2(8).each(move |n, shot| {
            shot.call.add_header("x-job-priority", priorities[n % 4]);
            shot.call.add_header("x-sim-ms", format!("{}", 900 + 1700 * (n * 7919 % 13) / 12));
        })
    };
    work(9.0, length * 6 / 10, 1).run(&envoy).await;
    fleet[2].set(Fault::status(500).after(Duration::from_millis(300)));
    work(13.0, length * 3 / 10, 2).run(&envoy).await;
    fleet[2].clear();
    let target = envoy.listener("ingress");
    let rush = work(12.0, length.div_ceil(6), 3);
    let rush = tokio::spawn(async move { rush.run(&target).await });
    tokio::time::sleep(Duration::from_secs(length as u64 / 10)).await;
    fleet[5].set(Fault::status(503).header("retry-after", "20"));
    eject(&envoy, &fleet, 1).await;
    tab.until("the ejection", "document.querySelector('.host[data-state=ejected]')").await;
    // The README says what the legend does.
    tab.eval("document.querySelector('.legend').open = false").await;
    picture(&tab, "page").await;
    rush.abort();
    assert_eq!(tab.complaints(), [""; 0]);
}
