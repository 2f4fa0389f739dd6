//! A pool follows what Envoy's admin page says, asked by one of us, and keeps what it last knew when the page says nothing of use.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use support::{AdminPage, Envoy, Fleet, Gpu, Listed, Load, Page, RunningEnvoy, eventually};

use crate::fleet::all_workers_know;

/// A fleet, all of it in Envoy's cluster, and a pool that follows a stand-in for the admin page, which lists it all at first.
pub struct Told {
    pub fleet: Fleet,
    pub page: AdminPage,
    pub envoy: RunningEnvoy,
}

/// The key `discovery`, as most tests have it.
pub fn often() -> Value {
    json!({"cluster": "envoy_admin", "interval_ms": 200})
}

/// The addresses of a pool's status, in its order.
pub fn addresses(books: &[Value]) -> Vec<&str> {
    books.iter().map(|host| host["address"].as_str().expect("an address")).collect()
}

/// What is said of the host at this address; panics if that is not exactly one entry.
pub fn entry(books: &[Value], address: SocketAddr) -> &Value {
    let address = address.to_string();
    let mut of = books.iter().filter(|host| host["address"] == *address);
    let entry = of.next().unwrap_or_else(|| panic!("no {address} in {books:#?}"));
    assert!(of.next().is_none(), "{address} is twice in {books:#?}");
    entry
}

/// What a page says where nothing is the matter with these hosts.
pub fn page_of<'a>(hosts: impl IntoIterator<Item = &'a support::GpuHost>) -> Page {
    Page::hosts("gpu", hosts.into_iter().map(|host| Listed::at(host.address())))
}

impl Told {
    /// With these keys in the pool, beside `discovery`.
    pub async fn start(hosts: usize, gpu: Gpu, keys: Value) -> Self {
        let (fleet, page) = (Fleet::start(hosts, gpu).await, AdminPage::start().await);
        page.show(page_of(fleet.iter()));
        let told = Self::launch(fleet, page, keys).await;
        told.envoy.until("it follows the page", |books| books.len() == hosts).await;
        all_workers_know().await;
        told
    }

    /// While the page knows no cluster.
    pub async fn start_before_the_page(hosts: usize, gpu: Gpu, keys: Value) -> Self {
        Self::launch(Fleet::start(hosts, gpu).await, AdminPage::start().await, keys).await
    }

    async fn launch(fleet: Fleet, page: AdminPage, mut keys: Value) -> Self {
        let object = keys.as_object_mut().expect("keys");
        object.entry("hosts").or_insert(json!([]));
        object.entry("discovery").or_insert(often());
        let envoy = Envoy::new("http2.yaml").hosts(&fleet).pool(keys).other_cluster("envoy_admin", &page).live().start().await;
        Self { fleet, page, envoy }
    }

    /// Waits for a good poll of what the page shows now.
    pub async fn read(&self) {
        let reads = count(&self.envoy, "read").await;
        // The first may have been under way.
        eventually("the page is read", async || count(&self.envoy, "read").await >= reads + 2).await;
    }

    /// Waits until so many polls more have failed.
    pub async fn fails(&self, polls: u64, what: &str) {
        let failed = |pool: &Value| pool["discovery"]["failed_polls"].as_u64().unwrap_or_else(|| panic!("no count in {pool}"));
        let before = failed(&self.envoy.pool_status().await);
        self.envoy.until_pool(what, |pool| failed(pool) >= before + polls).await;
    }
}

/// The metric of the polls.
async fn count(envoy: &RunningEnvoy, outcome: &str) -> u64 {
    let stats = envoy.stats().await;
    stats.get(&format!("wasmcustom.plimsoll.polls;pool=gpu;outcome={outcome}")).copied().unwrap_or(0)
}

/// What stands behind `filter=` in a path, decoded; panics where something in it needs to be encoded and is not.
fn filter(path: &str) -> String {
    let (_, encoded) = path.split_once("filter=").unwrap_or_else(|| panic!("no filter in {path}"));
    let mut bytes = encoded.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits = [bytes.next().expect("a digit"), bytes.next().expect("a digit")];
                decoded.push(u8::from_str_radix(std::str::from_utf8(&digits).expect("ASCII"), 16).expect("hexadecimal"));
            }
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => decoded.push(byte),
            other => panic!("{:?} is not encoded in {path}", other as char),
        }
    }
    String::from_utf8(decoded).expect("UTF-8")
}

/// Pages of which each would change the membership if it were believed, or if a half of it were.
fn useless(told: &Told) -> Vec<(&'static str, Page)> {
    let first = || page_of(&told.fleet[..1]);
    let text = |page: &str| Page::text(page.to_owned());
    let many = (0..1025).map(|n| Listed::at(([10, 0, (n / 250) as u8, (n % 250) as u8], 80).into()));
    let large = json!({"cluster_statuses": [{"name": "gpu", "host_statuses": [Listed::at(told.fleet[0].address()).json()]}]});
    vec![
        ("not JSON", text("<html>no such thing</html>")),
        ("empty", text("")),
        ("half of JSON", text("{\"cluster_statuses\": [")),
        ("other JSON", text("[1, 2, 3]")),
        ("clusters that are none", text("{\"cluster_statuses\": 7}")),
        ("404", first().status(404)),
        ("503", first().status(503)),
        ("without the cluster", text("{}")),
        ("with another cluster", Page::hosts("gpu2", [Listed::at(told.fleet[0].address())])),
        ("of 5 MB", Page::text(format!("{large}{}", " ".repeat(5 << 20)))),
        ("cut off", first().cut()),
        ("of more than 1,024 hosts", Page::hosts("gpu", many)),
        ("of hosts that cannot be read", Page::hosts("gpu", [Listed::pipe("/tmp/gpu.sock"), Listed::of(json!({}))])),
        ("later than two seconds", first().after(Duration::from_secs(4))),
        ("never there", Page::hang()),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_no_use_leaves_the_membership_as_it_was() {
    let told = Told::start(3, Gpu::new().slots(100).work_ms(20), json!({})).await;
    let load = Load::rate(50.0, 50).repeat(&told.envoy);
    let all = told.envoy.books().await;
    for (what, page) in useless(&told) {
        told.page.show(page_of(told.fleet.iter()));
        told.read().await;
        told.page.show(page);
        told.fails(1, &format!("a page {what} is a failed poll")).await;
        let pool = told.envoy.pool_status().await;
        let books = pool["hosts"].as_array().expect("hosts");
        assert_eq!(addresses(books), addresses(&all), "a page {what}");
        assert!(books.iter().all(|host| host["state"] == "serving"), "a page {what}: {books:?}");
        assert_eq!(pool["discovery"]["hosts"], 3, "a page {what}");
    }
    load.end().await.assert_served();
    told.envoy.settled().await;
    let pool = told.envoy.pool_status().await;
    assert_eq!((&pool["drift"], &pool["elsewhere"]), (&json!(0), &json!(0)));
    told.envoy.logged("plimsoll: pool gpu: could not read its hosts through envoy_admin: ").await;
    let failed = pool["discovery"]["failed_polls"].as_u64().expect("a count");
    eventually("the metric says the same", async || count(&told.envoy, "failed").await >= failed).await;
    let page = told.envoy.prometheus().await;
    for outcome in ["read", "failed"] {
        let labels = [r#"pool="gpu""#.to_owned(), format!(r#"outcome="{outcome}""#)];
        let is_it = |line: &&str| line.starts_with("plimsoll_polls{") && labels.iter().all(|label| line.contains(label));
        let sample = page.lines().find(is_it).unwrap_or_else(|| panic!("no plimsoll_polls of {outcome} in {page}"));
        assert!(sample.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()) > Some(1), "{sample}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_hosts_is_an_empty_pool_until_it_has_some() {
    let told = Told::start(2, Gpu::new(), json!({})).await;
    assert_eq!(told.envoy.client().post("/prompt", "{}").await.status, 200);
    told.page.show(Page::hosts("gpu", []));
    let pool = told.envoy.until_pool("nobody is there", |pool| pool["hosts"] == json!([])).await;
    assert_eq!((&pool["discovery"]["hosts"], &pool["eligible"]), (&json!(0), &json!(0)));
    let reply = told.envoy.client().post("/prompt", "{}").await;
    assert_eq!((reply.status, reply.header("x-plimsoll-verdict")), (503, Some("no_host")));
    let gauge = async || told.envoy.stats().await.get("wasmcustom.plimsoll.no_host;pool=gpu").copied();
    eventually("the gauge is up", async || gauge().await == Some(1)).await;
    told.page.show(page_of(told.fleet.iter()));
    told.envoy.until("they are there", |books| books.len() == 2).await;
    all_workers_know().await;
    Load::burst(20).run(&told.envoy).await.assert_served();
    eventually("the gauge is down", async || gauge().await == Some(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_before_the_first_good_poll_are_envoys_and_get_their_seat_with_it() {
    let told = Told::start_before_the_page(2, Gpu::new().slots(100), json!({})).await;
    told.page.show(Page::text("{}").status(503));
    told.fails(1, "the first polls fail").await;
    let pool = told.envoy.pool_status().await;
    assert_eq!(
        (&pool["hosts"], &pool["discovery"]["hosts"], &pool["discovery"]["age_ms"]),
        (&json!([]), &Value::Null, &Value::Null)
    );
    let clients = told.envoy.pool_over_workers(9).await;
    let jobs = Load::burst(9).header("x-sim-ms", "5000").over(&clients).start(&told.envoy);
    eventually("Envoy sends them", async || told.fleet.in_flight().iter().sum::<u64>() == 9).await;
    assert_eq!(told.envoy.pool_status().await["hosts"], json!([]));
    told.page.show(page_of(told.fleet.iter()));
    let counted = |books: &[Value]| told.fleet.iter().all(|host| entry(books, host.address())["in_flight"] == host.in_flight());
    told.envoy.until("each job is counted where it runs", |books| books.len() == 2 && counted(books)).await;
    all_workers_know().await;
    // New jobs go where fewer run.
    Load::burst(9).header("x-sim-ms", "1000").run(&told.envoy).await.assert_served();
    assert_eq!(told.fleet.jobs(), [9, 9]);
    jobs.await.expect("the load ran").assert_served();
    told.envoy.settled().await;
    let pool = told.envoy.pool_status().await;
    assert_eq!((&pool["drift"], &pool["discovery"]["hosts"]), (&json!(0), &json!(2)));
    assert!(pool["discovery"]["age_ms"].as_u64() < Some(2_000), "{}", pool["discovery"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_us_asks_for_all_about_once_an_interval() {
    let discovery = json!({"cluster": "envoy_admin", "interval_ms": 500});
    let told = Told::start(2, Gpu::new(), json!({"discovery": discovery})).await;
    // Every worker has served, so that every worker knows the pool.
    let clients = told.envoy.pool_over_workers(16).await;
    Load::one_by_one(32).over(&clients).run(&told.envoy).await.assert_served();
    let before = told.page.times();
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Ten, if one asks; thirty, if each of the three threads does.
    let asked = told.page.times() - before;
    assert!((5..=12).contains(&asked), "{asked} polls in 5 s, one each 0.5 s");
    for one in told.page.asked() {
        assert_eq!((one.method.as_str(), filter(&one.path).as_str()), ("GET", "^gpu$"), "{}", one.path);
        assert!(one.path.starts_with("/clusters?format=json&filter="), "{}", one.path);
    }
    let pool = told.envoy.pool_status().await;
    assert_eq!(pool["discovery"]["failed_polls"], 0, "{pool}");
    assert!(pool["discovery"]["age_ms"].as_u64() < Some(3_000), "{pool}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_fails_is_asked_less_often_until_it_is_well_again() {
    let discovery = json!({"cluster": "envoy_admin", "interval_ms": 400});
    let told = Told::start(1, Gpu::new(), json!({"discovery": discovery})).await;
    told.page.show(Page::text("no").status(503));
    // From the third on it waits four times as long.
    told.fails(3, "polls fail").await;
    let polls = async || {
        let before = told.page.times();
        tokio::time::sleep(Duration::from_secs(5)).await;
        told.page.times() - before
    };
    let failing = polls().await;
    assert!((1..=6).contains(&failing), "{failing} polls in 5 s: three are to be expected, twelve if it did not wait longer");
    told.page.show(page_of(told.fleet.iter()));
    told.page.asked_again(2).await;
    let well = polls().await;
    assert!((7..=15).contains(&well), "{well} polls in 5 s: twelve are to be expected, three if it still waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admin_interface_that_was_away_is_followed_again() {
    let told = Told::start(4, Gpu::new().slots(100).work_ms(20), json!({})).await;
    told.page.show(page_of(&told.fleet[..2]));
    told.envoy.until("two are left", |books| books.len() == 2).await;
    let clients = told.envoy.pool_over_workers(8).await;
    let load = Load::rate(50.0, 50).over(&clients).repeat(&told.envoy);
    let others = told.fleet[2..].iter().map(|host| host.jobs()).sum::<u64>();
    told.page.close().await;
    told.fails(4, "nobody is there to be asked").await;
    tokio::time::sleep(Duration::from_secs(7)).await;
    let pool = told.envoy.pool_status().await;
    assert_eq!(pool["discovery"]["hosts"], 2);
    assert!(pool["discovery"]["age_ms"].as_u64() >= Some(7_000), "{}", pool["discovery"]);
    assert_eq!(told.fleet[2..].iter().map(|host| host.jobs()).sum::<u64>(), others, "a host that had left got a job");
    told.page.show(page_of(&told.fleet[1..]));
    told.page.open().await;
    let now: Vec<String> = told.fleet.addresses()[1..].iter().map(ToString::to_string).collect();
    told.envoy
        .until("the other membership is followed", |books| {
            let mut known = addresses(books);
            known.sort_unstable();
            let mut now: Vec<&str> = now.iter().map(String::as_str).collect();
            now.sort_unstable();
            known == now
        })
        .await;
    told.fleet.clear_books();
    eventually("they get jobs", async || told.fleet.jobs()[1..].iter().all(|jobs| *jobs > 0)).await;
    load.end().await.assert_served();
    assert_eq!(told.fleet.jobs()[0], 0, "a host that had left got a job");
    told.envoy.settled().await;
    assert_eq!(told.envoy.pool_status().await["drift"], 0);
}

/// Gives the cluster and the pool another name, also where the route and the endpoints say it.
fn rename(bootstrap: &mut Value, name: &str) {
    let resources = &mut bootstrap["static_resources"];
    let cluster = resources["clusters"].as_array_mut().expect("clusters").iter_mut().find(|cluster| cluster["name"] == "gpu");
    let cluster = cluster.expect("our cluster");
    cluster["name"] = name.into();
    cluster["load_assignment"]["cluster_name"] = name.into();
    let manager = &mut resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = name.into();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_whose_name_is_full_of_signs_is_found_by_its_name() {
    const NAME: &str = "outbound|8080||gpu.svc";
    let (fleet, page) = (Fleet::start(2, Gpu::new()).await, AdminPage::start().await);
    let keys = json!({"pools": {NAME: {"discovery": often()}}});
    let named = || Envoy::new("http2.yaml").hosts(&fleet).configuration(keys.clone()).edit(|bootstrap| rename(bootstrap, NAME));
    // The real page takes the name as a regular expression.
    let envoy = named().other_cluster("outbound|8080||gpuXsvc", &fleet[0]).admin_cluster().start().await;
    let pool = async || envoy.status().await["pools"][NAME].take();
    eventually("its hosts are found", async || pool().await["discovery"]["hosts"] == 2).await;
    all_workers_know().await;
    Load::burst(20).header("x-sim-ms", "200").run(&envoy).await.assert_served();
    envoy.settled().await;
    let (pool, counted) = (pool().await, |pool: &Value| -> Vec<Value> {
        pool["hosts"].as_array().expect("hosts").iter().map(|host| host["requests"].clone()).collect()
    });
    assert_eq!((counted(&pool), &pool["discovery"]["failed_polls"]), (vec![json!(10), json!(10)], &json!(0)), "{pool}");
    // And this is what it is asked for.
    let beside = named().other_cluster("envoy_admin", &page).start_beside(&envoy).await;
    page.asked_again(1).await;
    assert_eq!(filter(&page.asked()[0].path), r"^outbound\|8080\|\|gpu\.svc$");
    drop(beside);
}
