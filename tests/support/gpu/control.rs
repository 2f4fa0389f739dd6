//! Playing with a running host by hand: `GET /sim/state` shows its numbers, `POST /sim/set` changes it.
//!
//! ```text
//! curl -d '{"fault": {"fault": "status", "status": 500, "next": 3}}'                 http://127.0.0.1:9001/sim/set
//! curl -d '{"fault": {"fault": "hang", "fraction": 0.5}, "for_ms": 5000}'            http://127.0.0.1:9001/sim/set
//! curl -d '{"fault": {"fault": "status", "status": 503, "headers": {"retry-after": "2"}}}' …
//! curl -d '{"door": "closed", "for_ms": 5000}'    …    (closed, ignoring, resetting, open)
//! curl -d '{"frozen": true, "for_ms": 5000}'      …
//! curl -d '{"speed": 0.25}'  …      curl -d '{"health": 503}'  …      curl -d '{"clear": true}'  …
//! ```
//!
//! Faults: `status`, `grpc`, `hang`, `reset`, `reset_in_body`, `refuse_stream`. `for_ms` takes fault, door and frost back after so
//! long; a host whose door is shut accepts no new connection, and one that is frozen hears nothing, so there it is required.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use serde::Deserialize;

use super::answer::Answer;
use super::serve::text;
use super::{Door, Fault, GpuHost, Shared};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    #[serde(default)]
    clear: bool,
    fault: Option<Fault>,
    speed: Option<f64>,
    health: Option<u16>,
    metrics: Option<String>,
    door: Option<Door>,
    #[serde(default)]
    frozen: bool,
    for_ms: Option<u64>,
}

impl Change {
    fn check(&self) -> Result<(), &'static str> {
        if self.speed.is_some_and(|speed| !(speed > 0.0 && speed.is_finite())) {
            return Err("speed: is above 0");
        }
        if self.health.is_some_and(|status| StatusCode::from_u16(status).is_err()) {
            return Err("health: is a status, 100 to 999");
        }
        if (self.frozen || self.door.is_some_and(|door| door != Door::Open)) && self.for_ms.is_none() {
            return Err("for_ms: is needed with frozen and with a door that is not open");
        }
        self.fault.as_ref().map_or(Ok(()), Fault::check)
    }

    fn apply(self, host: GpuHost) {
        if self.clear {
            host.clear();
            host.set_health(Some(200));
        }
        if let Some(fault) = self.fault {
            host.set(fault);
        }
        if let Some(speed) = self.speed {
            host.set_speed(speed);
        }
        if let Some(status) = self.health {
            host.set_health(Some(status));
        }
        if let Some(metrics) = self.metrics {
            host.set_metrics(metrics);
        }
        tokio::spawn(async move {
            // Not before the answer to this very request has left.
            tokio::time::sleep(Duration::from_millis(20)).await;
            if self.frozen {
                host.freeze();
            }
            if let Some(door) = self.door {
                host.set_door(door);
            }
            if let Some(ms) = self.for_ms {
                tokio::time::sleep(Duration::from_millis(ms)).await;
                host.thaw();
                host.set_door(Door::Open);
                host.clear();
            }
        });
    }
}

pub(super) async fn respond(shared: Arc<Shared>, request: Request<Incoming>) -> Response<Answer> {
    let path = request.uri().path().to_owned();
    match (request.method().as_str(), path.as_str()) {
        ("GET", "/sim/state") => text("application/json", serde_json::to_vec_pretty(&shared.books.counts()).unwrap()),
        ("POST", "/sim/set") => {
            let Ok(body) = request.into_body().collect().await else {
                return refusal(StatusCode::BAD_REQUEST, "no body");
            };
            match serde_json::from_slice::<Change>(&body.to_bytes()) {
                Err(error) => refusal(StatusCode::BAD_REQUEST, &error.to_string()),
                Ok(change) => match change.check() {
                    Err(error) => refusal(StatusCode::BAD_REQUEST, error),
                    Ok(()) => {
                        change.apply(GpuHost(shared));
                        text("application/json", "{\"done\":true}\n")
                    }
                },
            }
        }
        _ => refusal(StatusCode::NOT_FOUND, "GET /sim/state or POST /sim/set"),
    }
}

fn refusal(status: StatusCode, why: &str) -> Response<Answer> {
    let mut response = text("text/plain", format!("{why}\n"));
    *response.status_mut() = status;
    response
}
