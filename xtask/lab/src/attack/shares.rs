//! Users with unequal demand: each gets an equal share of the device's time.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use rocmforge_client::{Client, Options, ServerTrust};
use xtask::error::Result;
use xtask::host;

use super::users::Attack;
use super::{Target, unexpected};

/// Numbers of users.
const CROWDS: [u32; 4] = [1, 2, 8, 32];
/// Their uids begin here.
const FIRST: u32 = 54_400;
/// Until all of them have work.
const BEGIN: Duration = Duration::from_secs(5);
/// Least time that is measured. A fair share of it is at least [`SHARE_LEAST`]: beside that, a turn of 40 ms is little.
const MEASURED_LEAST: Duration = Duration::from_secs(10);
const SHARE_LEAST: Duration = Duration::from_secs(1);
/// The daemon's rates are averages over the past: what is as old as this counts 1/e.
const PAST: Duration = Duration::from_secs(10);
/// Rates are read so often.
const READ_EVERY: Duration = Duration::from_millis(250);
/// Furthest that a share may be from an equal one.
const OFF_MOST: f64 = 0.1;
/// Least part of the device's time that users with work take together.
const USED_LEAST: f64 = 0.9;

/// Prints a line for each crowd; what is wrong goes to `faults`.
pub fn run(target: &Target, faults: &mut Vec<String>) -> Result<()> {
    println!("\n{:<8}{:>12}{:>12}{:>12}{:>14}", "users", "least", "most", "off fair", "device used");
    for users in CROWDS {
        host::check_interrupted()?;
        let crowd = (0..users).map(|n| target.user(Attack::Demand, n, FIRST + n));
        let mut crowd = crowd.collect::<Result<Vec<_>>>()?;
        let measured = measure(target, MEASURED_LEAST.max(SHARE_LEAST * users));
        for user in &mut crowd {
            let _ = user.kill();
            let _ = user.wait();
        }
        let took = measured?;
        let shares: Vec<f64> =
            (FIRST..FIRST + users).map(|uid| took.get(&uid).copied().unwrap_or(0.0)).collect();
        let (all, fair) = (shares.iter().sum::<f64>(), shares.iter().sum::<f64>() / f64::from(users));
        let of_fair = |share: f64| share / fair.max(1e-9);
        let least = of_fair(shares.iter().copied().fold(f64::INFINITY, f64::min));
        let most = of_fair(shares.iter().copied().fold(0.0, f64::max));
        let off = (1.0 - least).max(most - 1.0);
        println!("{users:<8}{least:>12.3}{most:>12.3}{:>11.1}%{:>13.1}%", 100.0 * off, 100.0 * all);
        if off > OFF_MOST {
            let all = shares.iter().map(|share| format!("{:.2}", of_fair(*share))).collect::<Vec<_>>();
            println!("  of a fair share, by user: {}", all.join(" "));
            faults.push(format!("{users} users: a share is {:.1} % off a fair one", 100.0 * off));
        }
        if all < USED_LEAST {
            faults
                .push(format!("{users} users: together they take {:.1} % of the device's time", 100.0 * all));
        }
    }
    Ok(())
}

/// The part of the device's time that each user took while it was measured.
///
/// With x seconds a second a user's rate r changes by (x - r) / [`PAST`]. So x in all is r in all and [`PAST`] times the
/// change of r. The change alone would count late turns more than early ones.
fn measure(target: &Target, time: Duration) -> Result<BTreeMap<u32, f64>> {
    let options =
        Options { socket: target.daemon.socket(), trust: ServerTrust::Anyone, ..Options::default() };
    let client = Client::new(options);
    let rates = || -> Result<BTreeMap<u32, f64>> {
        let users = client.users().map_err(|error| unexpected(&error.to_string()))?.users;
        Ok(users.into_iter().map(|user| (user.uid, user.device_us_per_s as f64 / 1e6)).collect())
    };
    thread::sleep(BEGIN);
    let begun = Instant::now();
    let mut took = BTreeMap::new();
    let mut add = |uid: u32, seconds: f64| *took.entry(uid).or_insert(0.0) += seconds;
    let (mut before, mut at) = (rates()?, begun);
    before.iter().for_each(|(uid, rate)| add(*uid, -rate * PAST.as_secs_f64()));
    while begun.elapsed() < time {
        thread::sleep(READ_EVERY);
        let (now, rates) = (Instant::now(), rates()?);
        let passed = now.duration_since(at).as_secs_f64();
        for (uid, rate) in &rates {
            add(*uid, 0.5 * passed * (rate + before.get(uid).copied().unwrap_or(0.0)));
        }
        (before, at) = (rates, now);
    }
    before.iter().for_each(|(uid, rate)| add(*uid, rate * PAST.as_secs_f64()));
    let all = at.duration_since(begun).as_secs_f64();
    Ok(took.into_iter().map(|(uid, seconds)| (uid, seconds / all)).collect())
}
