//! Encrypted transfers: the machine's trust decides, and encryption stays on.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::{command, directory, model, names, run, sha256, skipping};

/// A certificate of no authority, for this machine.
const CERTIFICATE: &str = "[req]\ndistinguished_name = name\nx509_extensions = of_a_server\nprompt = no\n\
    [name]\nCN = localhost\n\
    [of_a_server]\nbasicConstraints = critical,CA:FALSE\nsubjectAltName = DNS:localhost,IP:127.0.0.1\n";

/// Serves the current directory over TLS; `/away.gguf` leads to the second argument. Prints its port.
const SERVER: &str = "
import http.server, ssl, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path != '/away.gguf':
            return super().do_GET()
        self.send_response(302)
        self.send_header('Location', sys.argv[1])
        self.end_headers()
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('certificate.pem', 'key.pem')
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
";

struct Encrypted {
    process: Child,
    port: String,
}

impl Drop for Encrypted {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A server of the directory; `None` after saying what is missing.
fn serve(directory: &Path, away: &str) -> Option<Encrypted> {
    let settings = directory.join("certificate.cnf");
    std::fs::write(&settings, CERTIFICATE).unwrap();
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-config"]).arg(&settings);
    make.arg("-keyout").arg(directory.join("key.pem")).arg("-out").arg(directory.join("certificate.pem"));
    if !make.output().is_ok_and(|output| output.status.success()) {
        skipping::skip("openssl cannot make a certificate");
        return None;
    }
    let mut server = Command::new("python3");
    server.args(["-c", SERVER, away]).current_dir(directory).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut process) = server.spawn() else {
        skipping::skip("python3, which serves over TLS, is not there");
        return None;
    };
    let mut port = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
    Some(Encrypted { process, port: port.trim().to_owned() })
}

#[test]
fn a_certificate_that_the_machine_does_not_trust_is_refused() {
    let (models, served) = (directory(), directory());
    let Some(server) = serve(served.path(), "http://127.0.0.1:9/m.gguf") else { return };
    std::fs::write(served.path().join("m.gguf"), model(400_000)).unwrap();
    let url = |file: &str| format!("https://localhost:{}/{file}", server.port);
    let refused = run(&mut command(models.path(), &[&url("m.gguf")]));
    assert_eq!((refused.code, refused.error()), (1, "Certificate"));
    assert_eq!(names(&models), [""; 0]);
    let trusting = |file: &str| {
        let mut command = command(models.path(), &[&url(file)]);
        run(command.env("SSL_CERT_FILE", served.path().join("certificate.pem")))
    };
    assert_eq!(trusting("m.gguf").file()["sha256"], sha256(&model(400_000)));
    let away = trusting("away.gguf");
    assert_eq!((away.code, away.error()), (1, "Web"));
    assert!(away.told["error"]["message"].as_str().unwrap().contains("not encrypted"), "{}", away.told);
}
