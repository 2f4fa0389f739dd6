//! Two Envoys in front of one fleet, each of which sees half of the jobs: what it costs, with reports of the hosts and without.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use support::RunningEnvoy;

use super::points::{fail_on_errors, limit, take_turn};
use super::systems::{Kind, Scaled};
use super::table::over;
use super::{CLASSES, Fleet, HEADLINE, Plan, Shown};
use crate::Effort;
use crate::figures::{Figure, Figures, Spread, Target};
use crate::options::chosen;
use crate::queue::alarm::Alarm;
use crate::queue::cards::Cards;
use crate::queue::systems::{self, Compared, Front};
use crate::queue::table::{Line, grid, milliseconds, quantile};
use crate::rounds::progress;

/// Of these, whatever the point is worth elsewhere.
const ROUNDS: usize = 2;

/// Of the hosts' metrics pages, in the machine's own time.
const INTERVAL_MS: u64 = 200;

/// Two Envoys beside the limit of one.
const TARGET: f64 = 1.25;

/// Who stands in front of the cards: ours with `least_time`, with the queue or, *inside*, without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Team {
    One,
    WithReports,
    Without,
    InsideWithReports,
    InsideWithout,
}

impl Team {
    const ALL: [Self; 5] = [Self::One, Self::WithReports, Self::Without, Self::InsideWithReports, Self::InsideWithout];

    /// Enough to see that the benchmark works.
    const QUICK: [Self; 2] = [Self::One, Self::WithReports];

    fn key(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::WithReports => "two_with_reports",
            Self::Without => "two_without_reports",
            Self::InsideWithReports => "two_inside_with_reports",
            Self::InsideWithout => "two_inside_without_reports",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::One | Self::WithReports | Self::Without => Kind::LeastTimeQueue,
            Self::InsideWithReports | Self::InsideWithout => Kind::LeastTime,
        }
    }

    fn has_reports(self) -> bool {
        matches!(self, Self::WithReports | Self::InsideWithReports)
    }
}

/// What `--only` knows of them.
pub fn keys() -> [&'static str; 5] {
    Team::ALL.map(Team::key)
}

/// A team, set up for the plan's scale.
#[derive(Clone, Copy, Debug)]
struct Member {
    team: Team,
    second: Duration,
}

impl Compared for Member {
    fn name(self) -> &'static str {
        match self.team {
            Team::One => "one Envoy",
            Team::WithReports => "two Envoys, reports",
            Team::Without => "two Envoys, no reports",
            Team::InsideWithReports => "two Envoys, no queue, reports",
            Team::InsideWithout => "two Envoys, no queue, no reports",
        }
    }

    fn key(self) -> &'static str {
        self.team.key()
    }

    fn about(self) -> &'static str {
        match self.team {
            Team::One => "ours, least_time, queue",
            Team::WithReports => {
                "two such, each of which gets half of the jobs at random, with telemetry.scrape of preset vllm every 200 ms"
            }
            Team::Without => "two such, each of which gets half of the jobs at random and knows of the other nothing",
            Team::InsideWithReports => "two of ours, least_time, without the queue, with telemetry.scrape as above",
            Team::InsideWithout => "two of ours, least_time, without the queue, which know of each other nothing",
        }
    }

    async fn start(self, hosts: &[SocketAddr], beside: Option<&RunningEnvoy>) -> Result<Vec<Front>, String> {
        let scrape = json!({"telemetry": {"scrape": {"preset": "vllm", "interval_ms": INTERVAL_MS}}});
        let keys = if self.team.has_reports() { scrape } else { json!({}) };
        let envoys = if self.team == Team::One { 1 } else { 2 };
        Scaled { kind: self.team.kind(), second: self.second }.ours(hosts, beside, keys, envoys).await
    }
}

/// Lets them take their turns.
pub async fn run(plan: &Plan, effort: Effort, only: Option<&[String]>, alarm: &Alarm, figures: &mut Figures) {
    let fleet = Fleet::Mixed;
    let all: &[Team] = if effort == Effort::Quick && only.is_none() { &Team::QUICK } else { &Team::ALL };
    let teams = chosen(all, Team::key, only);
    if teams.is_empty() {
        return;
    }
    let teams: Vec<Member> = teams.into_iter().map(|team| Member { team, second: plan.second }).collect();
    let rounds = plan.rounds.unwrap_or(ROUNDS);
    let records: Vec<_> = (0..rounds).map(|round| plan.record(fleet, HEADLINE, plan.jobs, 500 + round as u64)).collect();
    figures.note(format!(
        "two Envoys: the mixed fleet at load {HEADLINE}, {:.0} ms for each second, {} jobs in {rounds} rounds; a page every {INTERVAL_MS} ms is one every {:.1} s of a job's time",
        plan.second.as_secs_f64() * 1e3,
        plan.jobs * rounds,
        INTERVAL_MS as f64 / 1e3 / plan.second.as_secs_f64()
    ));
    let cards = Cards::start(&fleet.speeds(), true, alarm).await;
    let mut systems = systems::start(&teams, &cards.addresses, &CLASSES, figures).await;
    let mut shown: Vec<Shown<Member>> = systems.iter().map(|system| Shown { kind: system.kind, turns: Vec::new() }).collect();
    let lead = plan.lead(fleet);
    for (round, record) in records.iter().enumerate() {
        for place in 0..systems.len() {
            let index = (place + round) % systems.len();
            let system = &mut systems[index];
            let name = system.kind.name();
            progress(format_args!("two Envoys, round {} of {rounds}: {name}", round + 1));
            let turn = take_turn(system, &lead, record, &cards, alarm).await;
            fail_on_errors(name, &turn, figures);
            shown[index].turns.push(turn);
        }
    }
    progress(format_args!(""));
    let limits: Vec<_> = records.iter().map(|record| limit(record, fleet)).collect();
    give(&Line::of("the limit", "limit", &limits), &shown, figures);
}

fn give(limit: &Line, shown: &[Shown<Member>], figures: &mut Figures) {
    let lines: Vec<Line> = shown.iter().map(|shown| Line::of(shown.kind.name(), shown.kind.key(), &shown.turns)).collect();
    let one = shown.iter().zip(&lines).find(|(shown, _)| shown.kind.team == Team::One).map(|(_, line)| line);
    let mut rows = Vec::new();
    for line in [limit].into_iter().chain(&lines) {
        let (ratio, each) = line.over(limit);
        let spread = Spread::of(&each);
        rows.push((
            line.name.as_str(),
            vec![
                milliseconds(quantile(&line.latencies, 0.50)),
                milliseconds(quantile(&line.latencies, 0.95)),
                milliseconds(line.p99()),
                format!("{ratio:.3}"),
                format!("{:.2} … {:.2}", spread.min, spread.max),
                one.map(|one| format!("{:.2}", line.over(one).0)).unwrap_or_default(),
                line.account.most_held.to_string(),
            ],
        ));
    }
    let head = ["P50 ms", "P95", "P99", "P99/limit", "in rounds", "P99/one", "held"];
    figures.table(grid(&format!("two Envoys, mixed, load {HEADLINE}"), &head, &rows));
    for (shown, line) in shown.iter().zip(&lines) {
        let Member { team, .. } = shown.kind;
        figures.add_unprinted(Figure::new(
            format!("two_envoys.p99_ms.{}", line.key),
            format!("two Envoys: P99, {}", line.name),
            "ms",
            &[line.p99() * 1e3],
        ));
        let Some(one) = one.filter(|_| team != Team::One) else { continue };
        let words = format!("two Envoys: P99 at load {HEADLINE}, mixed, {} over one", line.name);
        let figure = over(format!("two_envoys.p99_over_one.{}", line.key), words, line, one);
        figures.add(if team.has_reports() { figure.target(Target::AtMost(TARGET)) } else { figure });
    }
}
