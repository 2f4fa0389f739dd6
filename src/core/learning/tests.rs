use super::*;
use crate::core::fixture::{at, pool_of, record_of};
use crate::core::random::Random;

const TAU: Duration = Duration::from_secs(30);

/// A pool that learns, and what is true of it.
struct World {
    record: Record,
    speeds: Vec<f32>,
    now: f64,
    random: Random,
    /// How far jobs of a class differ: the standard deviation of the logarithm.
    spread: f64,
    /// The work of a `story`.
    story: f32,
}

impl World {
    fn new(speeds: &[f32]) -> Self {
        let pool = pool_of(speeds.len(), r#", "policy": "least_time""#);
        Self { record: record_of(&pool), speeds: speeds.to_vec(), now: 1.0, random: Random::new(3), spread: 0.05, story: 4000.0 }
    }

    fn job(class: &str) -> Job {
        Job { label: Label::of(class.as_bytes()), ..Job::unknown() }
    }

    /// A job of so many milliseconds of work ends on a host.
    fn end(&mut self, job: &Job, work: f32, host: usize) {
        // Twelve of them are as good as normally distributed.
        let normal = (0..12).map(|_| self.random.unit()).sum::<f64>() - 6.0;
        let millis = f64::from(work / self.speeds[host]) * (normal * self.spread).exp();
        self.now += 0.1;
        let service = Duration::from_secs_f64(millis / 1e3);
        let lesson = Lesson { slot: host as u32, weight: 1.0, job, service };
        learn(&mut self.record, lesson, at(self.now), fading(TAU));
    }

    /// So many jobs of the mix of the sources: 70 % of 800 ms, 25 % of 4 s, 5 % of 6 s, on any host.
    fn mix(&mut self, jobs: usize) {
        for _ in 0..jobs {
            let (class, work) = match self.random.unit() {
                part if part < 0.7 => ("draft", 800.0),
                part if part < 0.95 => ("story", self.story),
                _ => ("film", 6000.0),
            };
            let host = self.random.below(self.speeds.len());
            self.end(&Self::job(class), work, host);
        }
    }

    /// The milliseconds that a job is expected to take on a host.
    fn expected(&self, class: &str, host: u32) -> f32 {
        let speed = self.record.insight(host).speed(at(self.now), fading(TAU));
        work_of(&self.record, &Self::job(class)).unwrap() / speed
    }

    /// By which factor the worst expectation is wrong.
    fn error(&self, classes: &[(&str, f32)]) -> f32 {
        let of = |(class, work): &(&str, f32), host: usize| {
            (self.expected(class, host as u32) / (work / self.speeds[host])).ln().abs()
        };
        let each = classes.iter().flat_map(|class| (0..self.speeds.len()).map(move |host| of(class, host)));
        each.fold(0.0, f32::max).exp()
    }
}

const CLASSES: [(&str, f32); 2] = [("draft", 800.0), ("story", 4000.0)];

const MIXED: [f32; 8] = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0];

#[test]
fn without_any_history_nothing_is_expected() {
    let world = World::new(&MIXED);
    assert_eq!(work_of(&world.record, &World::job("draft")), None);
    assert_eq!(world.record.insight(0).speed(at(1.0), fading(TAU)), 1.0);
}

#[test]
fn a_mixed_fleet_is_known_within_200_jobs_from_cold() {
    for seed in 0..20 {
        let mut world = World::new(&MIXED);
        world.random = Random::new(seed);
        world.mix(200);
        assert!(world.error(&CLASSES) < 1.25, "{seed}: {}", world.error(&CLASSES));
    }
}

#[test]
fn a_class_that_is_not_known_is_the_pools_mean() {
    let mut world = World::new(&[1.0; 4]);
    world.mix(400);
    let mean = work_of(&world.record, &World::job("never seen")).unwrap();
    assert_eq!(Some(mean), mean_work(&world.record));
    assert!((1_400.0..2_400.0).contains(&mean), "{mean}");
}

#[test]
fn one_job_that_took_a_hundred_times_as_long_moves_nothing_far() {
    let mut world = World::new(&MIXED);
    world.mix(600);
    let before = [world.expected("draft", 0), world.expected("draft", 1), world.expected("story", 0)];
    world.end(&World::job("draft"), 80_000.0, 0);
    let after = [world.expected("draft", 0), world.expected("draft", 1), world.expected("story", 0)];
    let moved = before.iter().zip(after).map(|(before, after)| (after / before).ln().abs());
    assert!(moved.clone().all(|moved| moved < 0.3), "{:?}", moved.collect::<Vec<_>>());
}

#[test]
fn a_host_that_changes_its_speed_is_known_again_after_twenty_of_its_jobs() {
    for (factor, seed) in [(0.25, 1), (0.5, 2), (2.0, 3), (4.0, 4), (0.1, 5), (10.0, 6)] {
        let mut world = World::new(&MIXED);
        world.random = Random::new(seed);
        world.mix(600);
        world.speeds[2] *= factor;
        world.mix(20 * 8);
        let right = 800.0 / world.speeds[2];
        let error = (world.expected("draft", 2) / right).ln().abs().exp();
        assert!(error < 1.25, "{factor}: {error}");
        assert!(world.error(&CLASSES) < 1.4, "{factor}: the others: {}", world.error(&CLASSES));
    }
}

#[test]
fn a_class_that_changes_is_known_again_after_twenty_of_its_jobs() {
    for (factor, seed) in [(4.0, 1), (0.25, 2), (2.0, 3), (10.0, 4)] {
        let mut world = World::new(&MIXED);
        world.random = Random::new(seed);
        world.mix(600);
        world.story *= factor;
        // A quarter of them are of the class.
        world.mix(80);
        assert!(world.error(&[("story", world.story)]) < 1.35, "{factor}: {}", world.error(&[("story", world.story)]));
        assert!(world.error(&[("draft", 800.0)]) < 1.6, "{factor}: the others: {}", world.error(&[("draft", 800.0)]));
    }
}

#[test]
fn a_class_of_unlike_jobs_says_little_of_hosts() {
    let mut world = World::new(&[1.0; 8]);
    let unlike = World::job("default");
    for job in 0..800 {
        let work = if job % 10 < 7 { 800.0 } else { 4000.0 };
        world.end(&unlike, work, job % 8);
    }
    let speeds: Vec<f32> = (0..8).map(|host| world.record.insight(host).speed(at(world.now), fading(TAU))).collect();
    assert!(speeds.iter().all(|speed| (0.6..1.6).contains(speed)), "{speeds:?}");
}

#[test]
fn a_cost_is_how_much_of_its_classes_work_a_job_is() {
    let mut world = World::new(&[1.0, 2.0]);
    for round in 0..60 {
        let cost = 1.0 + (round % 7) as f32;
        world.end(&Job { cost: Some(cost), ..World::job("image") }, 500.0 * cost, round % 2);
    }
    let work = |cost| work_of(&world.record, &Job { cost: Some(cost), ..World::job("image") }).unwrap();
    assert!((work(4.0) / work(1.0) - 4.0).abs() < 1e-3);
    let ratio =
        world.record.insight(1).speed(at(world.now), fading(TAU)) / world.record.insight(0).speed(at(world.now), fading(TAU));
    assert!((1.8..2.2).contains(&ratio), "{ratio}");
    // One without a cost is not taken for one of cost 1.
    assert_eq!(work_of(&world.record, &World::job("image")), mean_work(&world.record));
}

#[test]
fn the_unit_of_a_cost_may_be_as_small_as_a_pixel() {
    let mut world = World::new(&[1.0, 1.0]);
    let image = |pixels: f32| Job { cost: Some(pixels), ..World::job("image") };
    (0..40).for_each(|round| world.end(&image(2e7), 400.0, round % 2));
    for (cost, millis) in [(2e7, 400.0), (1e7, 200.0), (1e9, 20_000.0)] {
        let work = work_of(&world.record, &image(cost)).unwrap();
        assert!((work / millis - 1.0).abs() < 0.1, "{cost}: {work}");
    }
}

#[test]
fn whatever_cost_is_said_a_job_counts_no_more_and_no_less_than_fifty_means() {
    let mut world = World::new(&[1.0, 1.0]);
    let image = |cost: f32| Job { cost: Some(cost), ..World::job("image") };
    (0..40).for_each(|round| world.end(&image(1.0), 400.0, round % 2));
    let mean = mean_work(&world.record).unwrap();
    assert_eq!([1e12, 1e-6].map(|cost| work_of(&world.record, &image(cost)).unwrap()), [mean * 50.0, mean * 0.02]);
    // What was seen of a class itself is no client's word.
    (0..40).for_each(|round| world.end(&World::job("film"), 400_000.0, round % 2));
    (0..400).for_each(|round| world.end(&World::job("draft"), 400.0, round % 2));
    assert!(work_of(&world.record, &World::job("film")).unwrap() > mean_work(&world.record).unwrap() * 100.0);
}

#[test]
fn a_cost_is_a_number_above_0() {
    assert_eq!(["2.5", " 3 ", "1e3"].map(|text| cost(text.as_bytes())), [Some(2.5), Some(3.0), Some(1000.0)]);
    for text in ["", "0", "-1", "NaN", "inf", "1e13", "1e-7", "x", "1 2"] {
        assert_eq!(cost(text.as_bytes()), None, "{text}");
    }
    assert_eq!(cost(&[0xff, 0xfe]), None);
}

#[test]
fn an_idle_host_fades_to_the_mean_and_is_learned_anew_at_once() {
    let mut world = World::new(&[1.0, 1.0, 1.0, 0.25]);
    world.mix(400);
    pin(&mut world.record);
    let speed = |world: &World, now: f64| world.record.insight(3).speed(at(now), fading(TAU));
    assert!(speed(&world, world.now) < 0.5);
    let later = world.now + 3600.0;
    assert!((speed(&world, later) - 1.0).abs() < 0.01);
    world.now = later;
    world.speeds[3] = 1.0;
    (0..8).for_each(|_| world.end(&World::job("draft"), 800.0, 3));
    let right = world.expected("draft", 3) / 800.0;
    assert!((0.75..1.35).contains(&right), "{right}");
}

#[test]
fn a_weight_is_the_speed_that_is_believed_at_first() {
    let pool = crate::core::fixture::pool(
        r#""policy": "least_time", "hosts": [{"address": "10.0.0.1:80", "weight": 4}, {"address": "10.0.0.2:80"}]"#,
    );
    let mut record = record_of(&pool);
    let job = World::job("draft");
    for round in 0..40 {
        let (slot, weight) = if round % 2 == 0 { (0, 4.0) } else { (1, 1.0) };
        let lesson = Lesson { slot, weight, job: &job, service: Duration::from_millis(if slot == 0 { 200 } else { 800 }) };
        learn(&mut record, lesson, at(f64::from(round)), fading(TAU));
    }
    let learned = [0, 1].map(|slot| record.insight(slot).speed(at(40.0), fading(TAU)));
    assert!(learned.iter().all(|speed| (0.95..1.05).contains(speed)), "the weights say it all: {learned:?}");
}

#[test]
fn the_scale_is_pinned_and_no_expectation_moves_by_that() {
    let mut world = World::new(&MIXED);
    world.mix(400);
    let before = world.expected("draft", 5);
    pin(&mut world.record);
    assert!((world.expected("draft", 5) / before - 1.0).abs() < 1e-3);
    let sum: f32 = (0..8).map(|slot| world.record.insight(slot).log_speed).sum();
    assert!(sum.abs() < 1e-4, "{sum}");
}

#[test]
fn no_more_than_64_classes_have_a_name_and_those_in_use_keep_it() {
    let mut world = World::new(&[1.0; 2]);
    (0..20).for_each(|_| world.end(&World::job("draft"), 800.0, 0));
    for name in 0..10_000 {
        world.end(&World::job(&format!("junk {name}")), 5000.0, 1);
        world.now -= 0.1;
    }
    assert!(world.record.classes().len() <= MOST_CLASSES + 2, "{}", world.record.classes().len());
    assert!((700.0..900.0).contains(&world.expected("draft", 0)));
    assert!(world.record.class(Label::of(b"other").key).is_some());
    let unknown = work_of(&world.record, &World::job("one more")).unwrap();
    assert!((4000.0..6000.0).contains(&unknown), "it is one of the others: {unknown}");
    // Those that have been idle for long make room.
    world.now += 3600.0;
    (0..20).for_each(|_| world.end(&World::job("story"), 4000.0, 0));
    assert!(world.record.class(Label::of(b"story").key).is_some());
}

#[test]
fn costs_that_are_not_true_make_no_host_slow() {
    let mut world = World::new(&[1.0, 1.0, 1.0, 2.0]);
    for lies in [[1e12, 1e-6], [1e12, 1e12], [1e-6, 1e-6]] {
        for number in 0..800usize {
            // All take a second at speed 1, whatever a half of them say.
            let cost = if number % 2 == 0 { 1.0 } else { lies[number / 2 % 2] };
            let job = Job { cost: Some(cost), ..World::job("image") };
            let host = world.random.below(4);
            world.end(&job, 1000.0, host);
            pin(&mut world.record);
        }
        let speeds: Vec<f32> = (0..4).map(|host| world.record.insight(host).speed(at(world.now), fading(TAU))).collect();
        assert!(speeds.iter().all(|speed| (0.3..3.0).contains(speed)), "{lies:?}: {speeds:?}");
    }
    // A host that has fallen back to its processor is one that is slow.
    world.speeds[3] = 0.005;
    for _ in 0..200 {
        let (job, host) = (Job { cost: Some(1.0), ..World::job("image") }, world.random.below(4));
        world.end(&job, 1000.0, host);
        pin(&mut world.record);
    }
    let speed = |host: u32| world.record.insight(host).speed(at(world.now), fading(TAU));
    assert!(speed(3) < speed(0) / 40.0, "{} {}", speed(3), speed(0));
}

#[test]
fn a_host_that_runs_one_at_a_time_takes_a_job_up_when_the_one_before_it_ends() {
    let service = |latency: u64, since: u64, at_once, was_crowded| {
        service(Duration::from_millis(latency), at(10.0), at(10.0) + Duration::from_millis(since), at_once, was_crowded)
            .map_or(0, |service| service.as_millis())
    };
    assert_eq!(service(5000, 800, 1, true), 800);
    assert_eq!(service(800, 800, 1, false), 800);
    assert_eq!(service(5000, 400, 4, true), 1600);
    assert_eq!(service(900, 400, 4, true), 900, "it cannot have taken longer than it was there");
    assert_eq!(service(900, 100, 4, false), 900, "it had a slot of its own");
    assert_eq!(service(900, 400, 0, true), 400, "a host that no configuration describes any more");
}

#[test]
fn where_it_is_not_known_when_a_host_took_a_job_up_the_job_teaches_nothing() {
    let second = Duration::from_secs(1);
    assert_eq!(service(second, Instant::default(), at(10.0), 1, true), None);
    assert_eq!(service(second, Instant::default(), at(10.0), 1, false), Some(second), "it came to an idle host");
    assert_eq!(service(second, at(3600.0), at(10.0), 1, true), None, "the clock stepped back");
    assert_eq!(service(Duration::ZERO, at(9.0), at(10.0), 1, false), None, "its client took as long to send it");
}

proptest::proptest! {
    #[test]
    fn whatever_the_record_holds_what_is_learned_is_a_number(
        bits in proptest::collection::vec(proptest::prelude::any::<u32>(), 8), millis in 0u64..100_000_000, weight in 0.01f32..1000.0,
    ) {
        let mut world = World::new(&[1.0; 2]);
        world.mix(10);
        let float = |at: usize| f32::from_bits(bits[at]);
        world.record.with_insight(0, |insight| (insight.log_speed, insight.doubt, insight.run) = (float(0), float(1), bits[2] as i32));
        let classes = world.record.classes().len();
        for place in 0..classes {
            world.record.with_class(place, |class| (class.log_work, class.doubt, class.noise) = (float(3), float(4), float(5)));
        }
        for _ in 0..3 {
            let job = World::job("draft");
            let lesson = Lesson { slot: 0, weight, job: &job, service: Duration::from_millis(millis) };
            learn(&mut world.record, lesson, at(world.now), fading(TAU));
            pin(&mut world.record);
        }
        let speed = world.record.insight(0).speed(at(world.now), fading(TAU));
        proptest::prop_assert!(speed.is_finite() && speed > 0.0, "{speed}");
        let work = work_of(&world.record, &World::job("draft"));
        proptest::prop_assert!(work.is_none_or(|work| work.is_finite() && work > 0.0), "{work:?}");
    }
}
