//! Hostile chat templates: each ends as a typed error, in time, and costs the caller no memory.

use std::time::Duration;

use rocmforge::model::template::{
    Message, OUTPUT_BYTES_MAX, REQUEST_BYTES_MAX, Renderer, SOURCE_BYTES_MAX, TemplateError, TemplateRequest,
};
use rocmforge_test_support::script;

use crate::child;

fn render(template: &str) -> Result<String, TemplateError> {
    let renderer = Renderer::new(env!("CARGO_BIN_EXE_rocmforged"));
    renderer.render(&TemplateRequest::new(template, vec![Message::new("user", "Hi")]))
}

fn error(template: &str) -> TemplateError {
    render(template).expect_err(&template.chars().take(80).collect::<String>())
}

/// A template that grows a `namespace` value in a loop: it survives the loop, unlike a plain variable.
fn grown(start: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range(10000) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    )
}

#[test]
fn bombs_of_memory_end_as_out_of_memory() {
    for template in [
        "{{ '%0900000000d'|format(1) }}".to_owned(),
        "{{ '%.900000000f'|format(1.5) }}".to_owned(),
        "{{ 'a'.replace('', 'b' * 99999999) ~ 'c' * 99999999 ~ 'd' * 99999999 }}".to_owned(),
        grown("'aaaaaaaaaaaaaaaa'", "ns.x ~ ns.x"),
        grown("[0, 0, 0, 0, 0, 0, 0, 0]", "(ns.x + ns.x)|list"),
        grown("[]", "ns.x + [ 'a' * 99999 ~ i ]"),
    ] {
        assert!(template.len() < 130, "{}", template.len());
        let error = error(&template);
        assert!(matches!(error, TemplateError::OutOfMemory { limit_mib: 256 }), "{template}: {error:?}");
    }
}

#[test]
fn the_caller_keeps_its_memory() {
    if !child::inside() {
        return child::passes("template::the_caller_keeps_its_memory");
    }
    let anonymous_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    render("warm").unwrap();
    let before = anonymous_kib();
    for _ in 0..3 {
        error(&grown("'aaaaaaaaaaaaaaaa'", "ns.x ~ ns.x"));
        error("{{ '%0900000000d'|format(1) }}");
        error("{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}");
    }
    let grown_kib = anonymous_kib().saturating_sub(before);
    assert!(grown_kib <= 8 << 10, "the caller grew by {grown_kib} KiB from {before} KiB");
}

#[test]
fn endless_work_ends_as_too_slow() {
    // Far above the limit of processor time, which a busy machine may take long to use up.
    let renderer = Renderer::new(env!("CARGO_BIN_EXE_rocmforged")).with_deadline(Duration::from_secs(300));
    for (template, limit) in [
        // Limited by the number of steps.
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "its number of steps",
        ),
        // Few steps, each with much work.
        (
            "{% set x = 'a' * 20000000 %}{% for i in range(99999) %}{% set y = x|upper|lower %}{% endfor %}",
            "2 s of processor time",
        ),
    ] {
        match renderer.render(&TemplateRequest::new(template, vec![])) {
            Err(TemplateError::TooSlow { limit: found }) => assert_eq!(found, limit),
            other => panic!("{template}: {other:?}"),
        }
    }
}

#[test]
fn long_texts_end_as_output_too_long() {
    for template in [
        "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{{ 'a' * 1048577 }}",
    ] {
        let error = error(template);
        assert!(matches!(error, TemplateError::OutputTooLong { limit: OUTPUT_BYTES_MAX }), "{error:?}");
    }
    assert_eq!(render("{{ 'a' * 1048576 }}").unwrap().len(), OUTPUT_BYTES_MAX);
}

#[test]
fn long_sources_and_conversations_are_not_looked_at() {
    let error = error(&"{".repeat(10 << 20));
    assert!(
        matches!(error, TemplateError::SourceTooLong { bytes: 10_485_760, limit: SOURCE_BYTES_MAX }),
        "{error:?}"
    );
    let renderer = Renderer::new(env!("CARGO_BIN_EXE_rocmforged"));
    let message = Message::new("user", "\u{1}".repeat(REQUEST_BYTES_MAX / 6));
    let error = renderer.render(&TemplateRequest::new("", vec![message])).unwrap_err();
    assert!(matches!(error, TemplateError::RequestTooLong { limit: REQUEST_BYTES_MAX, .. }), "{error:?}");
}

#[test]
fn nesting_ends_without_a_way_out() {
    for template in [
        format!("{{{{ {}1{} }}}}", "(".repeat(60_000), ")".repeat(60_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(60_000), "]".repeat(60_000)),
        format!("{}{}", "{% if 1 %}".repeat(9000), "{% endif %}".repeat(9000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(60_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(60_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(60_000)),
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned(),
    ] {
        let start: String = template.chars().take(60).collect();
        let error = error(&template);
        let typed = matches!(
            error,
            TemplateError::Syntax { .. } | TemplateError::Failed { .. } | TemplateError::TooDeep
        );
        assert!(typed, "{start}: {error:?}");
    }
}

/// Dropping a list a million deep overflows the stack: the rendering process dies, its caller does not.
#[test]
fn values_nested_beyond_the_stack_kill_the_process_only() {
    let template = "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% for j in range(1000) %}\
                    {% set ns.x = [ns.x] %}{% endfor %}{% endfor %}";
    let error = error(template);
    assert!(matches!(error, TemplateError::TooDeep), "{error:?}");
}

/// A daemon may be started without a limit of its stack. Then these rendered, or died without a reason.
#[test]
fn nesting_has_the_same_end_under_every_limit_of_the_stack() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("rocmforged");
    let script =
        format!("ulimit -S -s \"$(ulimit -H -s)\"\nexec {} \"$@\"", env!("CARGO_BIN_EXE_rocmforged"));
    script::write(&program, &script);
    let renderer = Renderer::new(&program);
    let render = |template: &str| renderer.render(&TemplateRequest::new(template, vec![]));
    assert_eq!(render("{{ 1 + 1 }}").unwrap(), "2");
    let grown =
        "{% set ns = namespace(x=[]) %}{% for i in range(30000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    for template in [format!("{{{{ {}1 }}}}", "not ".repeat(60_000)), format!("{grown}{{{{ ns.x }}}}")] {
        let error = render(&template).unwrap_err();
        assert!(matches!(error, TemplateError::TooDeep), "{error:?}");
    }
}

#[test]
fn python_has_no_back_door() {
    for template in [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__dict__.x }}",
        "{{ lipsum.__globals__.x }}",
    ] {
        let error = error(template);
        assert!(matches!(error, TemplateError::Failed { .. }), "{template}: {error:?}");
    }
    for template in ["{% include '/etc/passwd' %}", "{% import '/etc/passwd' as x %}", "{% extends 'x' %}"] {
        let error = error(template);
        assert!(
            matches!(error, TemplateError::Failed { .. } | TemplateError::Syntax { .. }),
            "{template}: {error:?}"
        );
    }
}

#[test]
fn ranges_have_an_end() {
    for template in ["{% for i in range(999999999999) %}{% endfor %}", "{{ range(0, 10 ** 30)|list }}"] {
        let error = error(template);
        assert!(matches!(error, TemplateError::Failed { .. }), "{template}: {error:?}");
    }
}

#[test]
fn words_of_a_template_are_passed_on_and_bounded() {
    match error("{{ raise_exception('roles must alternate') }}") {
        TemplateError::Refused { message } => assert_eq!(message, "roles must alternate"),
        other => panic!("{other:?}"),
    }
    match error("{{ raise_exception('é' * 9999) }}") {
        TemplateError::Refused { message } => assert_eq!(message, "é".repeat(512)),
        other => panic!("{other:?}"),
    }
    // This template once made the rendering process panic.
    assert!(matches!(error("{%}{% if x %}"), TemplateError::Syntax { .. }));
    let error = error("{% if %}");
    assert!(
        matches!(&error, TemplateError::Syntax { message } if message.contains("line 1") || message.contains(":1")),
        "{error:?}"
    );
}

#[test]
fn programs_that_are_no_renderer_are_told_apart() {
    let request = TemplateRequest::new("", vec![]);
    let error = Renderer::new("/nonexistent/rocmforged").render(&request).unwrap_err();
    assert!(matches!(error, TemplateError::Process { action: "started", .. }), "{error:?}");
    let error = Renderer::new("/bin/false").render(&request).unwrap_err();
    assert!(matches!(&error, TemplateError::Died { status } if status == "exit status: 1"), "{error:?}");
}

#[test]
fn a_process_that_hangs_is_ended_and_reaped() {
    let request = TemplateRequest::new("x".repeat(SOURCE_BYTES_MAX), vec![]);
    // The first program reads nothing, the second closes its pipes and stays, the third writes without end.
    for (line, slow) in
        [("exec sleep 1000", true), ("exec sleep 1000 <&- >&- 2>&-", true), ("exec yes", false)]
    {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        script::write(&program, line);
        let renderer = Renderer::new(&program).with_deadline(Duration::from_millis(300));
        let error = renderer.render(&request).unwrap_err();
        match error {
            TemplateError::TooSlow { limit } if slow => assert_eq!(limit, "300 ms"),
            TemplateError::OutputTooLong { .. } if !slow => {}
            other => panic!("{line}: {other:?}"),
        }
    }
    let children = std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id()))
        .unwrap_or_default();
    for child in children.split_whitespace() {
        let name = std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
        assert!(!["sleep\n", "yes\n"].contains(&name.as_str()), "{child} {name}");
    }
}
