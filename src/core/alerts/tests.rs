use super::*;
use crate::core::fixture::{address, at};

/// A sink that is told what fires, second by second.
#[derive(Default)]
struct Bench {
    alerter: Alerter,
}

impl Bench {
    /// The alerts of the post that is due, if one is: what they are about, and whether they are over.
    fn post(&mut self, seconds: f64, firing: &[Option<usize>]) -> Vec<(String, bool)> {
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(1_800_000_000.0 + seconds);
        let Some(body) = self.alerter.post(&subjects(firing), at(seconds), wall) else { return Vec::new() };
        let alerts: Vec<Value> = serde_json::from_str(&body).unwrap();
        let about = |alert: &Value| alert["labels"]["host"].as_str().unwrap_or("pool").to_owned();
        alerts.iter().map(|alert| (about(alert), alert.get("endsAt").is_some())).collect()
    }

    fn taken(&mut self, seconds: f64, firing: &[Option<usize>]) -> Vec<(String, bool)> {
        let post = self.post(seconds, firing);
        self.alerter.answered(true);
        post
    }
}

fn subjects(firing: &[Option<usize>]) -> BTreeSet<Subject> {
    firing.iter().map(|host| Subject { pool: "gpu".into(), host: host.map(address) }).collect()
}

fn host(number: usize, is_over: bool) -> (String, bool) {
    (address(number).to_string(), is_over)
}

#[test]
fn what_fires_is_told_once_again_as_long_as_it_lasts_and_once_when_it_is_over() {
    let mut bench = Bench::default();
    assert_eq!(bench.taken(1.0, &[]), []);
    assert_eq!(bench.taken(2.0, &[Some(0)]), [host(0, false)]);
    assert!((3..150).all(|second| bench.taken(f64::from(second), &[Some(0)]).is_empty()));
    assert_eq!(bench.taken(153.0, &[Some(0)]), [host(0, false)]);
    assert_eq!(bench.taken(160.0, &[]), [host(0, true)]);
    assert!((161..400).all(|second| bench.taken(f64::from(second), &[]).is_empty()));
}

#[test]
fn all_that_is_due_goes_in_one_post() {
    let mut bench = Bench::default();
    assert_eq!(bench.taken(1.0, &[None, Some(0), Some(1)]), [("pool".to_owned(), false), host(0, false), host(1, false)]);
}

#[test]
fn one_that_flaps_is_told_once_a_minute() {
    let mut bench = Bench::default();
    let mut fired = 0;
    for second in 0..600 {
        let firing = if second % 4 < 2 { vec![Some(0)] } else { vec![] };
        fired += bench.taken(f64::from(second), &firing).iter().filter(|(_, is_over)| !is_over).count();
    }
    assert!((9..=10).contains(&fired), "{fired} in ten minutes");
}

#[test]
fn one_post_is_open_at_a_time_and_one_that_is_never_answered_is_given_up() {
    let mut bench = Bench::default();
    assert_eq!(bench.post(1.0, &[Some(0)]), [host(0, false)]);
    assert_eq!(bench.post(2.0, &[Some(0), Some(1)]), []);
    assert_eq!(bench.post(12.0, &[Some(0), Some(1)]), [host(1, false)]);
}

#[test]
fn a_sink_that_refuses_is_told_again_after_a_minute_and_that_it_is_over_at_most_five_times() {
    let mut bench = Bench::default();
    let mut posts = Vec::new();
    for second in 1..400 {
        let firing = if second < 130 { vec![Some(0)] } else { vec![] };
        let post = bench.post(f64::from(second), &firing);
        bench.alerter.answered(false);
        posts.extend(post.into_iter().map(|(_, is_over)| (second, is_over)));
    }
    let expected = [(1, false), (61, false), (121, false), (130, true), (140, true), (150, true), (160, true), (170, true)];
    assert_eq!(posts, expected);
}

#[test]
fn a_pool_that_another_watches_is_forgotten_without_a_word() {
    let mut bench = Bench::default();
    bench.taken(1.0, &[Some(0)]);
    bench.alerter.forget("gpu");
    assert_eq!(bench.taken(2.0, &[]), []);
}

#[test]
fn a_post_is_alertmanagers() {
    let mut alerter = Alerter::default();
    let wall = SystemTime::UNIX_EPOCH + Duration::from_millis(1_800_000_000_250);
    let body = alerter.post(&subjects(&[Some(0)]), at(1.0), wall).unwrap();
    alerter.answered(true);
    let alert = |over: Value| {
        let mut alert = json!({
            "labels": { "alertname": "PlimsollHostEjected", "severity": "warning", "pool": "gpu", "host": "10.0.0.1:80" },
            "annotations": { "summary": "10.0.0.1:80 of pool gpu fails and is left alone for a time" },
            "startsAt": "2027-01-15T08:00:00.250Z",
        });
        if over != Value::Null {
            alert["endsAt"] = over;
        }
        json!([alert])
    };
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), alert(Value::Null));
    let over = alerter.post(&subjects(&[]), at(3.0), wall + Duration::from_secs(2)).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&over).unwrap(), alert("2027-01-15T08:00:02.250Z".into()));
}
